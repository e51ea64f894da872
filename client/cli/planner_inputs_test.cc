#include "client/cli/planner_inputs.h"

#include "common/wire/durations.h"
#include "gtest/gtest.h"

namespace ringattn::client::cli {
namespace {

void AddRate(double flops_per_second, v1::WorkerInfo* worker) {
  v1::KernelRate* rate = worker->add_kernel_rates();
  rate->add_dtypes(v1::DATA_TYPE_FLOAT32);
  rate->set_flops_per_second(flops_per_second);
}

TEST(PlannerInputs, TheSlowestMemberCounts) {
  v1::Topology topology;
  for (const double factor : {1.0, 0.5, 2.0}) {
    v1::WorkerInfo* worker = topology.add_workers();
    worker->set_rank(topology.workers_size() - 1);
    AddRate(8e10 * factor, worker);
    worker->set_link_bytes_per_second(3e9 * factor);
    SetSeconds(1e-5 * factor, worker->mutable_call_overhead());
    SetSeconds(2e-5 * factor, worker->mutable_exchange_overhead());
  }
  AddRate(1, topology.add_workers());  // not in the ring
  const PlannerInputs inputs = InputsOf(topology, AttentionSpec(), Direction::kForward);
  EXPECT_EQ(inputs.ready_workers, 3);
  EXPECT_EQ(inputs.device_flops_per_s, 4e10);
  EXPECT_EQ(inputs.link_bytes_per_s, 1.5e9);
  EXPECT_EQ(inputs.step_overhead_s, 2e-5);
  EXPECT_EQ(inputs.exchange_overhead_s, 4e-5);
}

TEST(PlannerInputs, UnmeasuredRatesKeepTheirDefaults) {
  v1::Topology topology;
  topology.add_workers()->set_rank(0);
  const PlannerInputs inputs = InputsOf(topology, AttentionSpec(), Direction::kForward);
  EXPECT_EQ(inputs.ready_workers, 1);
  EXPECT_EQ(inputs.device_flops_per_s, PlannerInputs().device_flops_per_s);
  EXPECT_EQ(inputs.link_bytes_per_s, PlannerInputs().link_bytes_per_s);
  EXPECT_EQ(inputs.step_overhead_s, PlannerInputs().step_overhead_s);
}

}  // namespace
}  // namespace ringattn::client::cli
