// From a caller's arguments to what travels: checks the buffers' sizes and builds the
// stream's header.
#ifndef RINGATTN_CLIENT_CALL_CALL_PLAN_H_
#define RINGATTN_CLIENT_CALL_CALL_PLAN_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "client/api/call.h"
#include "client/call/attempt.h"
#include "client/transfer/byte_runs.h"

namespace ringattn::client {

struct ChunkLimits {
  uint32_t up_bytes = 0;
  uint32_t down_bytes = 0;
};

// The buffers alone. Errors: as below.
absl::Status CheckForwardSizes(const ForwardArgs& args, const ForwardResults& results);
absl::Status CheckBackwardSizes(const BackwardArgs& args, const BackwardResults& results);

// `regions`: the client's; null: it has none. Errors: INVALID_ARGUMENT naming the first buffer
// whose size is not what shape and dtype make it.
absl::StatusOr<CallPlan> PlanForward(const BasicForwardArgs<ConstRuns>& args,
                                     const BasicForwardResults<MutableRuns>& results,
                                     const CallOptions& options, const std::string& request_id,
                                     const ChunkLimits& limits,
                                     const RegionIndex* regions = nullptr);
absl::StatusOr<CallPlan> PlanBackward(const BasicBackwardArgs<ConstRuns>& args,
                                      const BasicBackwardResults<MutableRuns>& results,
                                      const CallOptions& options, const std::string& request_id,
                                      const ChunkLimits& limits,
                                      const RegionIndex* regions = nullptr);

// Whether the transport that the options wish for is host memory and all tensors lie in regions.
// REQUIRES: the sizes are right.
bool LiesInRegions(const ForwardArgs& args, const ForwardResults& results,
                   const CallOptions& options, const RegionIndex& regions);
bool LiesInRegions(const BackwardArgs& args, const BackwardResults& results,
                   const CallOptions& options, const RegionIndex& regions);

// A Backward that reads args.residual_handle: dout and DLSE are all that it sends.
absl::StatusOr<CallPlan> PlanResidualBackward(
    const BackwardArgs& args, const BackwardResults& results, const CallOptions& options,
    const std::string& request_id, const ChunkLimits& limits, const RegionIndex* regions);

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_CALL_CALL_PLAN_H_
