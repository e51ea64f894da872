// Planner inputs from a ring's own measurements.
#ifndef RINGATTN_SERVER_CORE_RING_MEASURED_INPUTS_H_
#define RINGATTN_SERVER_CORE_RING_MEASURED_INPUTS_H_

#include <string>
#include <vector>

#include "common/plan/planner.h"
#include "server/core/events/config.h"
#include "server/core/ring/ring.h"
#include "server/core/ring/roster.h"

namespace ringattn::server {

// Returns the slowest member's figures for the kernels that would serve this request, of the ring
// and of each host. Uses the planner's defaults for figures that no member has measured.
//   named  the members that the client chose; empty: the coordinator chooses them
PlannerInputs MeasuredInputs(const Ring& ring, const Roster& roster, const Limits& limits,
                             const AttentionSpec& spec, Direction direction,
                             const std::vector<std::string>& named);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_RING_MEASURED_INPUTS_H_
