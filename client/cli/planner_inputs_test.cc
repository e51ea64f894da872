#include "client/cli/planner_inputs.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
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
  const PlannerInputs inputs = InputsOf(topology, AttentionSpec(), Direction::kForward, {}, 7e8);
  EXPECT_EQ(inputs.ready_workers, 3);
  EXPECT_EQ(inputs.device_flops_per_s, 4e10);
  EXPECT_EQ(inputs.link_bytes_per_s, 1.5e9);
  EXPECT_EQ(inputs.step_overhead_s, 2e-5);
  EXPECT_EQ(inputs.exchange_overhead_s, 4e-5);
}

TEST(PlannerInputs, UnmeasuredRatesKeepTheirDefaults) {
  v1::Topology topology;
  topology.add_workers()->set_rank(0);
  const PlannerInputs inputs = InputsOf(topology, AttentionSpec(), Direction::kForward, {}, 7e8);
  EXPECT_EQ(inputs.ready_workers, 1);
  EXPECT_EQ(inputs.device_flops_per_s, PlannerInputs().device_flops_per_s);
  EXPECT_EQ(inputs.link_bytes_per_s, PlannerInputs().link_bytes_per_s);
  EXPECT_EQ(inputs.step_overhead_s, PlannerInputs().step_overhead_s);
  EXPECT_TRUE(inputs.hosts.empty());
}

TEST(PlannerInputs, HostsHaveTheirOwnFigures) {
  v1::Topology topology;
  for (const char* host : {"a", "a", "b"}) {
    v1::WorkerInfo* worker = topology.add_workers();
    worker->set_rank(topology.workers_size() - 1);
    worker->set_name(absl::StrCat("w", worker->rank()));
    worker->mutable_location()->set_host(host);
    AddRate(*host == 'a' ? 8e10 : 2e10, worker);
  }
  const auto inputs = [&](const std::vector<std::string>& named) {
    return InputsOf(topology, AttentionSpec(), Direction::kForward, named, 7e8);
  };
  ASSERT_EQ(inputs({}).hosts.size(), 2u);
  EXPECT_EQ(inputs({}).hosts[0].workers, 2);
  EXPECT_EQ(inputs({}).hosts[0].device_flops_per_s, 8e10);
  EXPECT_EQ(inputs({}).hosts[1].device_flops_per_s, 2e10);
  EXPECT_EQ(inputs({}).device_flops_per_s, 2e10);
  EXPECT_EQ(inputs({}).host_link_bytes_per_s, 7e8);
  EXPECT_FALSE(inputs({}).host_link_measured);
  EXPECT_EQ(inputs({"w2", "w0"}).host_of_member, (std::vector<int>{0, 1}));
  EXPECT_TRUE(inputs({"w1", "w0"}).host_of_member.empty());
  EXPECT_TRUE(inputs({"w2", "w9", "w0"}).host_of_member.empty());
  topology.mutable_workers(1)->set_host_link_bytes_per_second(3e9);
  topology.mutable_workers(2)->set_host_link_bytes_per_second(2e9);
  SetSeconds(3e-4, topology.mutable_workers(1)->mutable_host_exchange_overhead());
  EXPECT_EQ(inputs({}).host_link_bytes_per_s, 2e9);
  EXPECT_EQ(inputs({}).host_exchange_overhead_s, 3e-4);
  EXPECT_EQ(inputs({}).host_total_bytes_per_s, 0);
  EXPECT_EQ(inputs({}).HostBytesPerSecond(), 2e9);
  topology.mutable_workers(0)->set_host_total_bytes_per_second(5e9);
  topology.mutable_workers(2)->set_host_total_bytes_per_second(4e9);
  EXPECT_EQ(inputs({}).HostBytesPerSecond(), 4e9);
  EXPECT_TRUE(inputs({}).host_link_measured);
}

}  // namespace
}  // namespace ringattn::client::cli
