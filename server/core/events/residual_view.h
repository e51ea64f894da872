// Views of residuals for the edge and for metrics.
#ifndef RINGATTN_SERVER_CORE_EVENTS_RESIDUAL_VIEW_H_
#define RINGATTN_SERVER_CORE_EVENTS_RESIDUAL_VIEW_H_

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/attention/attention_spec.h"
#include "common/plan/planner.h"
#include "server/core/events/events.h"

namespace ringattn::server {

// The Forward's values for a Backward that reads its residual, or the reason that it may not.
struct ResidualView {
  std::optional<Failure> failure;
  std::shared_ptr<const AttentionSpec> spec;  // of the Forward
  PlanChoice choice;                          // the Forward's plan, fully determined
  std::vector<std::string> members;           // by ring rank: the workers that hold the residual
};

// The reason that a residual ended.
enum class ResidualEnd : uint8_t {
  kConsumed,
  kDeleted,
  kExpired,
  kLost,     // with a worker
  kEvicted,  // for the memory of a request
};
inline constexpr ResidualEnd kResidualEnds[] = {ResidualEnd::kConsumed, ResidualEnd::kDeleted,
                                                ResidualEnd::kExpired, ResidualEnd::kLost,
                                                ResidualEnd::kEvicted};
const char* ResidualEndName(ResidualEnd end);  // "consumed", ...

// For metrics.
struct ResidualCounts {
  int64_t residuals = 0;  // currently
  int64_t bytes = 0;      // currently, summed over workers
  // Since the start.
  int64_t kept = 0;
  int64_t refused = 0;  // Forwards that requested a residual and got none
  int64_t reads = 0;    // Backwards that succeeded with a residual
  std::array<int64_t, std::size(kResidualEnds)> ended{};  // by ResidualEnd
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_EVENTS_RESIDUAL_VIEW_H_
