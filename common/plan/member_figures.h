// Combines the measurements of a ring's members into the planner's inputs. Pure.
#ifndef RINGATTN_COMMON_PLAN_MEMBER_FIGURES_H_
#define RINGATTN_COMMON_PLAN_MEMBER_FIGURES_H_

#include <vector>

#include "common/plan/planner.h"

namespace ringattn {

// The measurements of one member. 0: not measured.
struct MemberFigures {
  double flops_per_second = 0;  // of the kernels that serve the request
  double link_bytes_per_second = 0;
  double call_overhead_seconds = 0;
  double exchange_overhead_seconds = 0;
};

// Returns as many ready workers as members, with the slowest member's figures. A figure that no
// member has measured keeps the planner's default.
PlannerInputs InputsOfMembers(const std::vector<MemberFigures>& members);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PLAN_MEMBER_FIGURES_H_
