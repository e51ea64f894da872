// The unary calls on residuals: DeleteResidual and RenewResiduals.
#ifndef RINGATTN_SERVER_EDGE_CALL_RESIDUAL_CALLS_H_
#define RINGATTN_SERVER_EDGE_CALL_RESIDUAL_CALLS_H_

#include <grpcpp/support/server_callback.h>

#include "ringattn/v1/attention.pb.h"
#include "server/edge/call/request_context.h"

namespace ringattn::server {

// Both identify the caller, query the core and answer from its thread; gRPC keeps request and
// response until Finish. Thread safe.
grpc::ServerUnaryReactor* HandleDeleteResidual(const RequestContext* context,
                                               grpc::CallbackServerContext* call,
                                               const v1::DeleteResidualRequest* request);
grpc::ServerUnaryReactor* HandleRenewResiduals(const RequestContext* context,
                                               grpc::CallbackServerContext* call,
                                               const v1::RenewResidualsRequest* request,
                                               v1::RenewResidualsResponse* response);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_CALL_RESIDUAL_CALLS_H_
