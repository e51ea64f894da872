// The HoldCaches stream.
#ifndef RINGATTN_SERVER_EDGE_KV_KV_HOLD_CALL_H_
#define RINGATTN_SERVER_EDGE_KV_KV_HOLD_CALL_H_

#include <grpcpp/support/server_callback.h>

#include "ringattn/v1/kv_cache.pb.h"
#include "server/edge/kv/kv_context.h"

namespace ringattn::server {

// Returns a reactor that deletes itself when the stream ends. `context` must outlive it. Thread
// safe.
grpc::ServerBidiReactor<v1::HoldCachesRequest, v1::HoldCachesResponse>* StartHoldCaches(
    const KvContext* context, grpc::CallbackServerContext* call);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_KV_KV_HOLD_CALL_H_
