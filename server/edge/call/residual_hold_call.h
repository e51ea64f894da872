// The stream of HoldResiduals.
#ifndef RINGATTN_SERVER_EDGE_CALL_RESIDUAL_HOLD_CALL_H_
#define RINGATTN_SERVER_EDGE_CALL_RESIDUAL_HOLD_CALL_H_

#include <grpcpp/support/server_callback.h>

#include "ringattn/v1/attention.pb.h"
#include "server/edge/call/request_context.h"

namespace ringattn::server {

// gRPC's until it is done. `context` outlives it. Thread safe.
grpc::ServerBidiReactor<v1::HoldResidualsRequest, v1::HoldResidualsResponse>* StartHoldResiduals(
    const RequestContext* context, grpc::CallbackServerContext* call);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_CALL_RESIDUAL_HOLD_CALL_H_
