#include "server/core/ring/measured_inputs.h"

#include <vector>

#include "common/plan/member_figures.h"
#include "common/wire/durations.h"
#include "common/wire/kernel_rate_values.h"

namespace ringattn::server {

PlannerInputs MeasuredInputs(const Ring& ring, const Roster& roster, const Limits& limits,
                             const AttentionSpec& spec, Direction direction) {
  std::vector<MemberFigures> members;
  for (ConnectionId member : ring.members()) {
    const Worker& worker = roster.at(member);
    const v1::Register& registration = worker.registration;
    const std::vector<KernelRate> rates = KernelRatesOf(registration.kernel_rates());
    const KernelRate* rate = RateOf(rates, spec, direction);
    MemberFigures& figures = members.emplace_back();
    figures.flops_per_second = rate == nullptr ? 0 : rate->flops_per_second;
    figures.call_overhead_seconds = ToSeconds(registration.call_overhead());
    if (worker.committed.generation() != ring.generation()) continue;
    if (worker.committed.link_bytes_per_second() <= 0) continue;
    figures.link_bytes_per_second = worker.committed.link_bytes_per_second();
    figures.exchange_overhead_seconds = ToSeconds(worker.committed.exchange_overhead());
  }
  PlannerInputs inputs = InputsOfMembers(members);
  inputs.single_device_threshold_tokens = limits.single_device_threshold_tokens;
  return inputs;
}

}  // namespace ringattn::server
