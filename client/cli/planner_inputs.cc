#include "client/cli/planner_inputs.h"

#include <algorithm>

#include "common/wire/durations.h"

namespace ringattn::client::cli {
namespace {

// 0 is "not measured" on either side.
double Slower(double a, double b) {
  if (a == 0 || b == 0) return std::max(a, b);
  return std::min(a, b);
}

}  // namespace

PlannerInputs InputsOf(const v1::Topology& topology) {
  PlannerInputs inputs;
  double flops = 0, link = 0, call_overhead = 0;
  for (const v1::WorkerInfo& worker : topology.workers()) {
    if (!worker.has_rank()) continue;
    ++inputs.ready_workers;
    flops = Slower(flops, worker.flops_per_second());
    link = Slower(link, worker.link_bytes_per_second());
    call_overhead = std::max(call_overhead, ToSeconds(worker.call_overhead()));
    inputs.exchange_overhead_s =
        std::max(inputs.exchange_overhead_s, ToSeconds(worker.exchange_overhead()));
  }
  if (flops > 0) inputs.device_flops_per_s = flops;
  if (link > 0) inputs.link_bytes_per_s = link;
  if (call_overhead > 0) inputs.step_overhead_s = call_overhead;
  return inputs;
}

}  // namespace ringattn::client::cli
