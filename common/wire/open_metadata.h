// OpenShard in a call's initial metadata: what a stream of ShardService is for, so that it is
// admitted or refused before any of its messages is read.
#ifndef RINGATTN_COMMON_WIRE_OPEN_METADATA_H_
#define RINGATTN_COMMON_WIRE_OPEN_METADATA_H_

#include <optional>

#include <grpcpp/client_context.h>
#include <grpcpp/server_context.h>

#include "ringattn/v1/shard.pb.h"

namespace ringattn::wire {

// "-bin": gRPC carries any bytes under it.
inline constexpr char kOpenShardMetadataKey[] = "ringattn-open-bin";

// Before the call starts, once. One of more than Limits.max_open_shard_bytes is not read.
void PutOpenShard(const v1::OpenShard& open, grpc::ClientContext* context);

// Nothing if it is missing, there more than once, too large or no OpenShard. Says nothing of what
// stands in it.
std::optional<v1::OpenShard> ReadOpenShard(const grpc::ServerContextBase& context);

}  // namespace ringattn::wire

#endif  // RINGATTN_COMMON_WIRE_OPEN_METADATA_H_
