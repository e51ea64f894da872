// What the edge asks of residuals, and what operators see of them.
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

// What a Backward with a residual takes from its Forward; or why it cannot.
struct ResidualView {
  std::optional<Failure> why_not;
  std::shared_ptr<const AttentionSpec> spec;  // the Forward's
  PlanChoice choice;                          // nothing left to choose
  std::vector<std::string> members;           // by ring rank: the workers that have it
};

// How a residual ended.
enum class ResidualEnd : uint8_t {
  kConsumed,
  kDeleted,
  kExpired,
  kLost,     // with a worker
  kEvicted,  // a request needed its memory
};
inline constexpr ResidualEnd kResidualEnds[] = {ResidualEnd::kConsumed, ResidualEnd::kDeleted,
                                                ResidualEnd::kExpired, ResidualEnd::kLost,
                                                ResidualEnd::kEvicted};
const char* ResidualEndName(ResidualEnd end);  // "consumed", ...

// For metrics.
struct ResidualCounts {
  int64_t residuals = 0;  // now
  int64_t bytes = 0;      // now, of all workers together
  // Since the start.
  int64_t kept = 0;
  int64_t refused = 0;  // Forwards that asked for one and got none
  int64_t reads = 0;    // Backwards that succeeded with one
  std::array<int64_t, std::size(kResidualEnds)> ended{};  // by ResidualEnd
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_EVENTS_RESIDUAL_VIEW_H_
