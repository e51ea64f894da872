// OpenShard in a call's initial metadata. It states the purpose of a ShardService stream, so that a
// worker can accept or reject the stream before it reads a message.
#ifndef RINGATTN_COMMON_WIRE_OPEN_METADATA_H_
#define RINGATTN_COMMON_WIRE_OPEN_METADATA_H_

#include <optional>

#include <grpcpp/client_context.h>
#include <grpcpp/server_context.h>

#include "ringattn/v1/shard.pb.h"

namespace ringattn::wire {

// "-bin": gRPC permits arbitrary bytes in the value.
inline constexpr char kOpenShardMetadataKey[] = "ringattn-open-bin";

// Call once, before the call starts. Messages above Limits.max_open_shard_bytes are not read.
void PutOpenShard(const v1::OpenShard& open, grpc::ClientContext* context);

// Returns nullopt if the key is missing or repeated, or if its value is too large or not an
// OpenShard. Does not validate the fields.
std::optional<v1::OpenShard> ReadOpenShard(const grpc::ServerContextBase& context);

}  // namespace ringattn::wire

#endif  // RINGATTN_COMMON_WIRE_OPEN_METADATA_H_
