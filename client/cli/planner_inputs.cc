#include "client/cli/planner_inputs.h"

#include <vector>

#include "common/plan/member_figures.h"
#include "common/wire/durations.h"
#include "common/wire/kernel_rate_values.h"

namespace ringattn::client::cli {

PlannerInputs InputsOf(const v1::Topology& topology, const AttentionSpec& spec,
                       Direction direction) {
  std::vector<MemberFigures> members;
  for (const v1::WorkerInfo& worker : topology.workers()) {
    if (!worker.has_rank()) continue;
    const std::vector<KernelRate> rates = KernelRatesOf(worker.kernel_rates());
    const KernelRate* rate = RateOf(rates, spec, direction);
    members.push_back({.flops_per_second = rate == nullptr ? 0 : rate->flops_per_second,
                       .link_bytes_per_second = worker.link_bytes_per_second(),
                       .call_overhead_seconds = ToSeconds(worker.call_overhead()),
                       .exchange_overhead_seconds = ToSeconds(worker.exchange_overhead())});
  }
  return InputsOfMembers(members);
}

}  // namespace ringattn::client::cli
