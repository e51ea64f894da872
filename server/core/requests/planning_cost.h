// What making a plan will cost, before it is made.
#ifndef RINGATTN_SERVER_CORE_REQUESTS_PLANNING_COST_H_
#define RINGATTN_SERVER_CORE_REQUESTS_PLANNING_COST_H_

#include "common/plan/planner.h"

namespace ringattn::server {

// Seconds of one core, within an order of magnitude. It decides whose plan is made next and
// is charged to the request's client; nothing is refused because of it.
double PlanningCostSeconds(const AttentionSpec& spec, const PlanChoice& choice,
                           const PlannerInputs& inputs);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_REQUESTS_PLANNING_COST_H_
