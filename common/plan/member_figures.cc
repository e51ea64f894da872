#include "common/plan/member_figures.h"

#include <algorithm>

namespace ringattn {
namespace {

double Slower(double a, double b) {
  if (a == 0 || b == 0) return std::max(a, b);
  return std::min(a, b);
}

}  // namespace

PlannerInputs InputsOfMembers(const std::vector<MemberFigures>& members) {
  PlannerInputs inputs;
  inputs.ready_workers = static_cast<int>(members.size());
  double flops = 0, link = 0, call_overhead = 0;
  for (const MemberFigures& member : members) {
    flops = Slower(flops, member.flops_per_second);
    link = Slower(link, member.link_bytes_per_second);
    call_overhead = std::max(call_overhead, member.call_overhead_seconds);
    inputs.exchange_overhead_s =
        std::max(inputs.exchange_overhead_s, member.exchange_overhead_seconds);
  }
  if (flops > 0) inputs.device_flops_per_s = flops;
  if (link > 0) inputs.link_bytes_per_s = link;
  if (call_overhead > 0) inputs.step_overhead_s = call_overhead;
  return inputs;
}

}  // namespace ringattn
