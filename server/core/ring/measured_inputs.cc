#include "server/core/ring/measured_inputs.h"

#include <string>
#include <utility>
#include <vector>

#include "common/plan/member_figures.h"
#include "common/wire/durations.h"

namespace ringattn::server {

PlannerInputs MeasuredInputs(const Ring& ring, const Roster& roster, const Limits& limits,
                             const AttentionSpec& spec, Direction direction,
                             const std::vector<std::string>& named) {
  std::vector<MemberFigures> members;
  for (ConnectionId member : ring.members()) {
    const Worker& worker = roster.at(member);
    const v1::Register& registration = worker.registration;
    const KernelRate* rate = RateOf(worker.kernel_rates, spec, direction);
    MemberFigures& figures = members.emplace_back();
    figures.name = registration.name();
    figures.host = registration.location().host();
    figures.flops_per_second = rate == nullptr ? 0 : rate->flops_per_second;
    figures.call_overhead_seconds = ToSeconds(registration.call_overhead());
    if (worker.committed.generation() != ring.generation()) continue;
    const v1::Committed& committed = worker.committed;
    if (committed.link_bytes_per_second() > 0) {
      figures.link_bytes_per_second = committed.link_bytes_per_second();
      figures.exchange_overhead_seconds = ToSeconds(committed.exchange_overhead());
    }
    if (committed.host_link_bytes_per_second() > 0) {
      figures.host_link_bytes_per_second = committed.host_link_bytes_per_second();
      figures.host_exchange_overhead_seconds = ToSeconds(committed.host_exchange_overhead());
    }
    figures.host_total_bytes_per_second = committed.host_total_bytes_per_second();
  }
  PlannerInputs inputs = InputsOfMembers(
      members, named, static_cast<double>(limits.default_host_link_bytes_per_second));
  inputs.single_device_threshold_tokens = limits.single_device_threshold_tokens;
  return inputs;
}

}  // namespace ringattn::server
