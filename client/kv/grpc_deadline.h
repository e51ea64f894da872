// Deadlines of gRPC calls and queues on the monotonic clock. A std::chrono::system_clock deadline
// moves if the wall clock is set between its computation and its use.
#ifndef RINGATTN_CLIENT_KV_GRPC_DEADLINE_H_
#define RINGATTN_CLIENT_KV_GRPC_DEADLINE_H_

#include <grpc/support/time.h>

#include <algorithm>
#include <cstdint>

#include "absl/time/time.h"

namespace ringattn::client {

// Returns the deadline that ends in `time`, or now if that is negative.
inline gpr_timespec GrpcDeadlineIn(absl::Duration time) {
  const int64_t nanos = absl::ToInt64Nanoseconds(std::max(time, absl::ZeroDuration()));
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_nanos(nanos, GPR_TIMESPAN));
}

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_KV_GRPC_DEADLINE_H_
