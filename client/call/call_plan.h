// Translates a caller's arguments into a CallPlan: checks buffer sizes, chooses the transports to
// offer, and builds the stream's first message.
// Tests: client/api/client_test.cc, residual_call_test.cc, region_call_test.cc.
#ifndef RINGATTN_CLIENT_CALL_CALL_PLAN_H_
#define RINGATTN_CLIENT_CALL_CALL_PLAN_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/api/call.h"
#include "client/call/attempt.h"

namespace ringattn::client {

// Largest chunk in each direction, in bytes. up_bytes 0: the server's recommendation.
struct ChunkLimits {
  uint32_t up_bytes = 0;
  uint32_t down_bytes = 0;
};

struct PlannedRequest {
  CallPlan plan;
  // Replaces `plan` if the residual that it reads no longer exists: the same call with its
  // tensors. Null if the call has no residual, or the caller gave no tensors.
  std::shared_ptr<const CallPlan> fallback = nullptr;
};

// Returns INVALID_ARGUMENT naming the first buffer whose size differs from what shape, dtype and
// writer require. The Backward form requires an empty residual_handle.
absl::Status CheckSizes(const ForwardArgs& args, const ForwardResults& results,
                        const CallOptions& options);
absl::Status CheckSizes(const BackwardArgs& args, const BackwardResults& results,
                        const CallOptions& options);

// Plans one call. The plan refers to the caller's memory. `regions` are the client's.
// Requires options.request_id. Errors: INVALID_ARGUMENT for a wrong buffer size, a malformed
// traceparent, or options that contradict each other.
absl::StatusOr<PlannedRequest> PlanRequest(const ForwardArgs& args, const ForwardResults& results,
                                           const CallOptions& options, const ChunkLimits& limits,
                                           const RegionIndex& regions);
absl::StatusOr<PlannedRequest> PlanRequest(const BackwardArgs& args, const BackwardResults& results,
                                           const CallOptions& options, const ChunkLimits& limits,
                                           const RegionIndex& regions);

// Plans a call that only prepares, for a lease of `ttl`; 0: the server's default. It has no
// tensors: of the arguments' buffers only the presence of DLSE counts. The server checks all
// arguments.
CallPlan PlanPreparation(const ForwardArgs& args, absl::Duration ttl, const ChunkLimits& limits);
CallPlan PlanPreparation(const BackwardArgs& args, absl::Duration ttl, const ChunkLimits& limits);

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_CALL_CALL_PLAN_H_
