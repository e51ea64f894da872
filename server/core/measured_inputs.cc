#include "server/core/measured_inputs.h"

#include <algorithm>

#include "common/wire/durations.h"

namespace ringattn::server {

PlannerInputs MeasuredInputs(const Ring& ring, const Roster& roster, const Limits& limits) {
  PlannerInputs inputs;
  inputs.ready_workers = ring.members().size();
  inputs.single_device_threshold_tokens = limits.single_device_threshold_tokens;
  double flops = 0, link = 0;  // 0: none has measured
  double call_overhead = 0;
  for (ConnectionId member : ring.members()) {
    const Worker& worker = roster.at(member);
    const v1::Register& registration = worker.registration;
    const bool measured_ring = worker.committed.generation() == ring.generation() &&
                               worker.committed.link_bytes_per_second() > 0;
    const double its_flops = registration.flops_per_second();
    const double its_link = measured_ring ? worker.committed.link_bytes_per_second()
                                          : registration.link_bytes_per_second();
    if (its_flops > 0 && (flops == 0 || its_flops < flops)) flops = its_flops;
    if (its_link > 0 && (link == 0 || its_link < link)) link = its_link;
    call_overhead = std::max(call_overhead, ToSeconds(registration.call_overhead()));
    if (!measured_ring) continue;
    inputs.exchange_overhead_s =
        std::max(inputs.exchange_overhead_s, ToSeconds(worker.committed.exchange_overhead()));
  }
  if (flops > 0) inputs.device_flops_per_s = flops;
  if (link > 0) inputs.link_bytes_per_s = link;
  if (call_overhead > 0) inputs.step_overhead_s = call_overhead;
  return inputs;
}

}  // namespace ringattn::server
