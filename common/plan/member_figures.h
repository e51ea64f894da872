// What the members of a ring have measured, as the planner wants it. Pure.
#ifndef RINGATTN_COMMON_PLAN_MEMBER_FIGURES_H_
#define RINGATTN_COMMON_PLAN_MEMBER_FIGURES_H_

#include <vector>

#include "common/plan/planner.h"

namespace ringattn {

// One member's. 0: not measured.
struct MemberFigures {
  double flops_per_second = 0;  // of the kernels that serve the request
  double link_bytes_per_second = 0;
  double call_overhead_seconds = 0;
  double exchange_overhead_seconds = 0;
};

// As many workers as members, and the slowest one's figures; the planner's defaults where
// none has measured.
PlannerInputs InputsOfMembers(const std::vector<MemberFigures>& members);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PLAN_MEMBER_FIGURES_H_
