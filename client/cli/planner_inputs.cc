#include "client/cli/planner_inputs.h"

#include <vector>

#include "common/plan/member_figures.h"
#include "common/wire/durations.h"
#include "common/wire/kernel_rate_values.h"

namespace ringattn::client::cli {

PlannerInputs InputsOf(const v1::Topology& topology, const AttentionSpec& spec, Direction direction,
                       const std::vector<std::string>& named, double default_host_link) {
  std::vector<MemberFigures> members;
  std::vector<std::string> names;
  for (const v1::WorkerInfo& worker : topology.workers()) {
    if (!worker.has_rank()) continue;
    const std::vector<KernelRate> rates = KernelRatesOf(worker.kernel_rates());
    const KernelRate* rate = RateOf(rates, spec, direction);
    names.push_back(worker.name());
    members.push_back(
        {.host = worker.location().host(),
         .flops_per_second = rate == nullptr ? 0 : rate->flops_per_second,
         .link_bytes_per_second = worker.link_bytes_per_second(),
         .call_overhead_seconds = ToSeconds(worker.call_overhead()),
         .exchange_overhead_seconds = ToSeconds(worker.exchange_overhead()),
         .host_link_bytes_per_second = worker.host_link_bytes_per_second(),
         .host_exchange_overhead_seconds = ToSeconds(worker.host_exchange_overhead())});
  }
  PlannerInputs inputs = InputsOfMembers(members, default_host_link);
  inputs.host_of_member = HostsOfNamed(named, names, members);
  return inputs;
}

}  // namespace ringattn::client::cli
