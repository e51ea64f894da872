// Redirects gRPC's messages to this project's log.
#ifndef RINGATTN_COMMON_WIRE_GRPC_LOG_H_
#define RINGATTN_COMMON_WIRE_GRPC_LOG_H_

namespace ringattn::wire {

// After this call gRPC's messages (only errors, unless GRPC_VERBOSITY requests more) go through
// Log() as JSON, with its rate limits, instead of to stderr. Call after InitLogging.
void LogForGrpc();

}  // namespace ringattn::wire

#endif  // RINGATTN_COMMON_WIRE_GRPC_LOG_H_
