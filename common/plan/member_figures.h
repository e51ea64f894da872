// Combines the measurements of a ring's members into the planner's inputs. Pure.
#ifndef RINGATTN_COMMON_PLAN_MEMBER_FIGURES_H_
#define RINGATTN_COMMON_PLAN_MEMBER_FIGURES_H_

#include <string>
#include <vector>

#include "common/plan/planner.h"

namespace ringattn {

// The measurements of one member. 0: not measured.
struct MemberFigures {
  std::string name;
  std::string host;             // members with the same value are on one host
  double flops_per_second = 0;  // of the kernels that serve the request
  double link_bytes_per_second = 0;
  double call_overhead_seconds = 0;
  double exchange_overhead_seconds = 0;
  // Between this member's host and a neighbouring one.
  double host_link_bytes_per_second = 0;
  // The same for all workers of both hosts together.
  double host_total_bytes_per_second = 0;
  double host_exchange_overhead_seconds = 0;
};

// Returns as many ready workers as members, with the slowest member's figures, and the same for
// each host if there are several. A figure that no member has measured keeps the planner's default;
// the rate between hosts is then `default_host_link`.
//   members  in ring order
//   named    PlanChoice::members. If a name is missing, host_of_member is empty; the request then
//            fails.
PlannerInputs InputsOfMembers(const std::vector<MemberFigures>& members,
                              const std::vector<std::string>& named, double default_host_link);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PLAN_MEMBER_FIGURES_H_
