// gRPC's own messages in our log.
#ifndef RINGATTN_COMMON_WIRE_GRPC_LOG_H_
#define RINGATTN_COMMON_WIRE_GRPC_LOG_H_

namespace ringattn::wire {

// From here on what gRPC has to say (errors only, unless GRPC_VERBOSITY asks for more)
// goes through Log(), as JSON and with its limits, instead of to stderr. After InitLogging.
void LogForGrpc();

}  // namespace ringattn::wire

#endif  // RINGATTN_COMMON_WIRE_GRPC_LOG_H_
