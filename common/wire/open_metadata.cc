#include "common/wire/open_metadata.h"

#include <iterator>

#include "common/base/limits.h"

namespace ringattn::wire {

void PutOpenShard(const v1::OpenShard& open, grpc::ClientContext* context) {
  context->AddMetadata(kOpenShardMetadataKey, open.SerializeAsString());
}

std::optional<v1::OpenShard> ReadOpenShard(const grpc::ServerContextBase& context) {
  const auto [first, last] = context.client_metadata().equal_range(kOpenShardMetadataKey);
  if (std::distance(first, last) != 1) return std::nullopt;
  const grpc::string_ref bytes = first->second;
  if (static_cast<int64_t>(bytes.size()) > Limits().max_open_shard_bytes) return std::nullopt;
  v1::OpenShard open;
  if (!open.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return std::nullopt;
  return open;
}

}  // namespace ringattn::wire
