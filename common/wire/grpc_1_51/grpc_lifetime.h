// How long gRPC lives in a process that uses it.
#ifndef RINGATTN_COMMON_WIRE_GRPC_1_51_GRPC_LIFETIME_H_
#define RINGATTN_COMMON_WIRE_GRPC_1_51_GRPC_LIFETIME_H_

#include <grpc/grpc.h>

namespace ringattn::wire {

// From the first call on, gRPC stays up until the process ends. Left to itself it shuts
// down with its last channel or server, inside that object's destructor, and joins its
// executor's threads there. One of them may sit in the poller of its TCP writes, which
// nothing wakes for 10 s: with 2 cores that is rare, with 32 it was almost every call.
// Thread safe.
inline void KeepGrpcRunning() {
  static const bool kept = (grpc_init(), true);
  static_cast<void>(kept);
}

}  // namespace ringattn::wire

#endif  // RINGATTN_COMMON_WIRE_GRPC_1_51_GRPC_LIFETIME_H_
