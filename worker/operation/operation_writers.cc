#include "worker/operation/operation_writers.h"

#include <string>
#include <tuple>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/wire/token_spans.h"

namespace ringattn::worker {

absl::StatusOr<OperationWriters> OperationWriters::Read(const v1::Reserve& reserve,
                                                        const AttentionSpec& spec) {
  OperationWriters writers;
  std::vector<Shard> q, kv;
  for (const v1::WriterRows& rows : reserve.writers()) {
    absl::StatusOr<Shard> queries = FromProto(rows.q());
    absl::StatusOr<Shard> keys = FromProto(rows.kv());
    for (const absl::StatusOr<Shard>* shard : {&queries, &keys}) {
      if (shard->ok()) continue;
      return absl::InvalidArgumentError(absl::StrCat("writers: ", shard->status().message()));
    }
    q.push_back(*queries);
    kv.push_back(*keys);
    writers.rows_.push_back({*std::move(queries), *std::move(keys)});
  }
  if (!writers.any()) return writers;
  for (const auto& [shards, axis, tokens] :
       {std::tuple(&q, "q", spec.shape.seq_len_q), std::tuple(&kv, "kv", spec.shape.seq_len_kv)}) {
    if (const std::string why = CheckCover(*shards, tokens, "writer"); !why.empty()) {
      return absl::InvalidArgumentError(absl::StrCat("writers.", axis, ": ", why));
    }
  }
  return writers;
}

std::optional<ShardMap> OperationWriters::MapOf(const AttentionSpec& spec, TensorId id) const {
  if (!any() || !IsSplitByWriters(id)) return std::nullopt;
  return MapToWriters(spec, rows_, id);
}

}  // namespace ringattn::worker
