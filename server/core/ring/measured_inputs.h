// What a ring has measured of itself, as the planner wants it.
#ifndef RINGATTN_SERVER_CORE_RING_MEASURED_INPUTS_H_
#define RINGATTN_SERVER_CORE_RING_MEASURED_INPUTS_H_

#include "common/plan/planner.h"
#include "server/core/events/config.h"
#include "server/core/ring/ring.h"
#include "server/core/ring/roster.h"

namespace ringattn::server {

// The slowest member's figures for a request: of the kernels that would serve it; the planner's
// defaults where none has measured.
PlannerInputs MeasuredInputs(const Ring& ring, const Roster& roster, const Limits& limits,
                             const AttentionSpec& spec, Direction direction);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_RING_MEASURED_INPUTS_H_
