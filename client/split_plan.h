// From a caller's arguments to the requests that they travel as: one, or with
// CallOptions::streams the parts that call_split.h makes.
#ifndef RINGATTN_CLIENT_SPLIT_PLAN_H_
#define RINGATTN_CLIENT_SPLIT_PLAN_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/api/call.h"
#include "client/call/attempt.h"
#include "client/call/call_plan.h"

namespace ringattn::client {

struct PlannedRequest {
  std::string request_id;  // <the call's>/<index>; the call's own if there is but one
  CallPlan plan;
  // With the tensors, for when the residual that `plan` reads is gone; null: there are none.
  std::shared_ptr<const CallPlan> fallback;
  std::function<void()> collect;  // as SplitRequest::collect: may own memory of the plan
};

// At least one request; one if all tensors lie in `regions`. REQUIRES: options.request_id is set.
// Errors: those of PlanForward and SplitForward (PlanBackward, SplitBackward).
absl::StatusOr<std::vector<PlannedRequest>> PlanForwardRequests(const ForwardArgs& args,
                                                                const ForwardResults& results,
                                                                const CallOptions& options,
                                                                const ChunkLimits& limits,
                                                                const RegionIndex& regions = {});
absl::StatusOr<std::vector<PlannedRequest>> PlanBackwardRequests(const BackwardArgs& args,
                                                                 const BackwardResults& results,
                                                                 const CallOptions& options,
                                                                 const ChunkLimits& limits,
                                                                 const RegionIndex& regions = {});

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_SPLIT_PLAN_H_
