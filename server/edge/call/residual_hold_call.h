// The HoldResiduals stream.
#ifndef RINGATTN_SERVER_EDGE_CALL_RESIDUAL_HOLD_CALL_H_
#define RINGATTN_SERVER_EDGE_CALL_RESIDUAL_HOLD_CALL_H_

#include <grpcpp/support/server_callback.h>

#include "ringattn/v1/attention.pb.h"
#include "server/edge/call/request_context.h"

namespace ringattn::server {

// Returns a reactor that deletes itself when the stream ends. `context` must outlive it. Thread
// safe.
grpc::ServerBidiReactor<v1::HoldResidualsRequest, v1::HoldResidualsResponse>* StartHoldResiduals(
    const RequestContext* context, grpc::CallbackServerContext* call);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_CALL_RESIDUAL_HOLD_CALL_H_
