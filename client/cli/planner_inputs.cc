#include "client/cli/planner_inputs.h"

#include <vector>

#include "common/plan/member_figures.h"
#include "common/wire/durations.h"
#include "common/wire/kernel_rate_values.h"

namespace ringattn::client::cli {

PlannerInputs InputsOf(const v1::Topology& topology, const AttentionSpec& spec, Direction direction,
                       const std::vector<std::string>& named, double default_host_link) {
  std::vector<MemberFigures> members;
  for (const v1::WorkerInfo& worker : topology.workers()) {
    if (!worker.has_rank()) continue;
    const std::vector<KernelRate> rates = KernelRatesOf(worker.kernel_rates());
    const KernelRate* rate = RateOf(rates, spec, direction);
    members.push_back(
        {.name = worker.name(),
         .host = worker.location().host(),
         .flops_per_second = rate == nullptr ? 0 : rate->flops_per_second,
         .link_bytes_per_second = worker.link_bytes_per_second(),
         .call_overhead_seconds = ToSeconds(worker.call_overhead()),
         .exchange_overhead_seconds = ToSeconds(worker.exchange_overhead()),
         .host_link_bytes_per_second = worker.host_link_bytes_per_second(),
         .host_total_bytes_per_second = worker.host_total_bytes_per_second(),
         .host_exchange_overhead_seconds = ToSeconds(worker.host_exchange_overhead())});
  }
  return InputsOfMembers(members, named, default_host_link);
}

}  // namespace ringattn::client::cli
