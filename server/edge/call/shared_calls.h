// SharedCalls: one stream of AttentionService.Calls, and the calls on it.
//
//   client --CallsRequest--> SharedCalls --first message--> RequestCall
//   client <--CallsResponse-- [queue] <--messages, status-- RequestCall
//
// Each request is a RequestCall, as on a separate RPC. Only its ClientStream differs.
//
// Tests: shared_calls_test.cc
#ifndef RINGATTN_SERVER_EDGE_CALL_SHARED_CALLS_H_
#define RINGATTN_SERVER_EDGE_CALL_SHARED_CALLS_H_

#include <grpcpp/server_context.h>

#include "server/edge/call/client_stream.h"
#include "server/edge/call/request_context.h"

namespace ringattn::server {

// Returns a reactor that deletes itself when gRPC has released the stream.
ByteStreamReactor* StartSharedCalls(const RequestContext* context,
                                    grpc::CallbackServerContext* call);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_CALL_SHARED_CALLS_H_
