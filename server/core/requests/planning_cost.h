// Predicts the cost of planning a request.
#ifndef RINGATTN_SERVER_CORE_REQUESTS_PLANNING_COST_H_
#define RINGATTN_SERVER_CORE_REQUESTS_PLANNING_COST_H_

#include "common/plan/planner.h"

namespace ringattn::server {

// Returns seconds of one core, within an order of magnitude. Used to order planning and to charge
// the client; no request is rejected because of it.
double PlanningCostSeconds(const AttentionSpec& spec, const PlanChoice& choice,
                           const PlannerInputs& inputs);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_REQUESTS_PLANNING_COST_H_
