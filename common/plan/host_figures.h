// HostFigures: the workers of one host and their slowest member's figures.
#ifndef RINGATTN_COMMON_PLAN_HOST_FIGURES_H_
#define RINGATTN_COMMON_PLAN_HOST_FIGURES_H_

namespace ringattn {

// Rates of equal hosts differ by several percent. A host below this part of another's rate has
// other devices or links.
inline constexpr double kSlowHostRatio = 0.5;

struct HostFigures {
  int workers = 0;
  // As in PlannerInputs, of this host's slowest member.
  double device_flops_per_s = 0;
  double link_bytes_per_s = 0;
  double step_overhead_s = 0;
  double exchange_overhead_s = 0;

  bool operator==(const HostFigures&) const = default;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PLAN_HOST_FIGURES_H_
