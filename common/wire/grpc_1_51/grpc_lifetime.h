// Keeps gRPC initialised until the process ends.
#ifndef RINGATTN_COMMON_WIRE_GRPC_1_51_GRPC_LIFETIME_H_
#define RINGATTN_COMMON_WIRE_GRPC_1_51_GRPC_LIFETIME_H_

#include <grpc/grpc.h>

namespace ringattn::wire {

// From the first call on, gRPC stays initialised until the process ends. By default it shuts down
// with its last channel or server, inside that object's destructor, and joins its executor's
// threads there. One of them may be in the poller of its TCP writes, which nothing wakes for 10 s.
// That is rare with 2 cores but happened in almost every call with 32. Thread safe.
inline void KeepGrpcRunning() {
  static const bool kept = (grpc_init(), true);
  static_cast<void>(kept);
}

}  // namespace ringattn::wire

#endif  // RINGATTN_COMMON_WIRE_GRPC_1_51_GRPC_LIFETIME_H_
