// Tests of the hosts that a request gets, and of the cost model's two link rates.
#include "common/plan/host_rings.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

// 32 query heads and 8 kv heads of 128 in bf16.
AttentionSpec Spec(int64_t tokens) {
  AttentionSpec spec;
  spec.dtype = DType::kBFloat16;
  spec.shape.seq_len_q = spec.shape.seq_len_kv = tokens;
  spec.shape.cu_seqlens_q = spec.shape.cu_seqlens_k = {0, tokens};
  spec.shape.num_heads = 32;
  spec.shape.num_kv_heads = 8;
  spec.shape.head_dim = spec.shape.head_dim_v = 128;
  spec.options.causal = true;
  return spec;
}

// Hosts of GPUs at 6e14 FLOP/s that exchange at 300 GB/s inside a host.
PlannerInputs Hosts(const std::vector<int>& workers, double host_link) {
  PlannerInputs inputs;
  inputs.device_flops_per_s = 6e14;
  inputs.link_bytes_per_s = 3e11;
  inputs.step_overhead_s = 1e-5;
  inputs.exchange_overhead_s = 1e-5;
  inputs.host_link_bytes_per_s = host_link;
  inputs.host_link_measured = true;
  inputs.host_exchange_overhead_s = 3e-5;
  for (int count : workers) {
    inputs.hosts.push_back({count, inputs.device_flops_per_s, inputs.link_bytes_per_s,
                            inputs.step_overhead_s, inputs.exchange_overhead_s});
    inputs.ready_workers += count;
  }
  if (workers.size() == 1) inputs.hosts.clear();
  return inputs;
}

Plan MustPlan(const AttentionSpec& spec, const PlannerInputs& inputs,
              const PlanChoice& choice = {}) {
  const absl::StatusOr<Plan> plan = PlanRequest(spec, Direction::kForward, choice, inputs);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return plan.ok() ? *plan : Plan{};
}

PlanChoice WorldSize(int world_size) {
  PlanChoice choice;
  choice.world_size = world_size;
  return choice;
}

TEST(HostRingsTest, RanksFillTheLargestHostsFirst) {
  const PlannerInputs inputs = Hosts({2, 4, 2}, 1e9);
  EXPECT_TRUE(HostOfEachRank(inputs, 4).empty());
  EXPECT_EQ(HostOfEachRank(inputs, 5), (std::vector<int>{0, 0, 0, 0, 1}));
  EXPECT_EQ(HostOfEachRank(inputs, 8), (std::vector<int>{0, 0, 0, 0, 1, 1, 2, 2}));
  EXPECT_TRUE(HostOfEachRank(Hosts({8}, 1e9), 8).empty());
}

TEST(HostRingsTest, RingsGrowTwofold) {
  std::vector<int> workers;
  for (const HostRing& ring : RingsOfWholeHosts(Hosts({4, 4, 4, 4, 4}, 1e9), false, 0)) {
    workers.push_back(ring.workers);
    EXPECT_EQ(ring.inputs.ready_workers, ring.workers);
    EXPECT_EQ(ring.inputs.hosts.size(), ring.hosts);
  }
  EXPECT_EQ(workers, (std::vector<int>{4, 8, 16, 20}));
  // Smaller rings lack the memory.
  const std::vector<HostRing> rings = RingsOfWholeHosts(Hosts({4, 4, 4}, 1e9), false, 9);
  ASSERT_EQ(rings.size(), 1);
  EXPECT_EQ(rings[0].workers, 12);
  EXPECT_EQ(RingsOfWholeHosts(Hosts({4, 4}, 1e9), false, 100).size(), 1);
}

TEST(HostRingsTest, HostsThatComputeMostComeFirst) {
  PlannerInputs inputs = Hosts({2, 4}, 1e9);
  inputs.hosts[1].device_flops_per_s = 1e13;
  EXPECT_EQ(RingsOfWholeHosts(inputs, false, 0)[0].workers, 2);
  EXPECT_EQ(RingsOfWholeHosts(inputs, false, 0)[0].inputs.device_flops_per_s, 6e14);
  EXPECT_EQ(RingsOfWholeHosts(inputs, false, 0)[1].inputs.device_flops_per_s, 1e13);
  EXPECT_TRUE(RingsOfWholeHosts(inputs, false, 0)[0].has_own_figures);
  EXPECT_EQ(RingsOfWholeHosts(inputs, /*deterministic=*/true, 0)[0].workers, 4);
  // Equal hosts have rates that differ a little.
  inputs.hosts[1].device_flops_per_s = 4e14;
  inputs.device_flops_per_s = 4e14;
  EXPECT_EQ(RingsOfWholeHosts(inputs, false, 0)[0].workers, 4);
  EXPECT_FALSE(RingsOfWholeHosts(inputs, false, 0)[0].has_own_figures);
  inputs.hosts[0].link_bytes_per_s = 1e11;
  EXPECT_TRUE(RingsOfWholeHosts(inputs, false, 0)[0].has_own_figures);
}

TEST(HostRingsTest, OneHostHasNoChoiceOfHosts) {
  const PlannerInputs one = Hosts({8}, 1e9);
  const Plan plan = MustPlan(Spec(65536), one);
  EXPECT_EQ(plan.shards.world_size, 8);
  EXPECT_FALSE(plan.may_grow);
  EXPECT_EQ(plan.reason,
            "65536 tokens exceed the single-device threshold of 32768: ring over all 8 workers; "
            "zigzag, which balances causal work");
}

// The arithmetic of the host link: 65,536 tokens on two hosts of eight take longer than on one, and
// long requests take half as long.
TEST(HostRingsTest, ASlowLinkKeepsShortRequestsOnOneHost) {
  const PlannerInputs hundred_gbit = Hosts({8, 8}, 12.5e9);
  const Plan near = MustPlan(Spec(65536), hundred_gbit);
  EXPECT_EQ(near.shards.world_size, 8);
  EXPECT_TRUE(near.may_grow);
  EXPECT_TRUE(absl::StrContains(near.reason, "ring over 8 workers on 1 of 2 hosts, predicted"))
      << near.reason;
  EXPECT_TRUE(absl::StrContains(near.reason,
                                "on 2 hosts, with 1.25e+10 bytes/s between hosts "
                                "(measured)"))
      << near.reason;
  const Plan far = MustPlan(Spec(524288), hundred_gbit);
  EXPECT_EQ(far.shards.world_size, 16);
  EXPECT_FALSE(far.may_grow);
  EXPECT_TRUE(absl::StrContains(far.reason, "ring over all 16 workers on 2 hosts, predicted"))
      << far.reason;
  // Without a measurement, the reason says so.
  PlannerInputs assumed = hundred_gbit;
  assumed.host_link_measured = false;
  EXPECT_TRUE(absl::StrContains(MustPlan(Spec(65536), assumed).reason, "(assumed)"));
}

// Section 6, row 8, by prediction: the planner's choice against the best of all forced sizes, and
// against the same request without the other hosts.
TEST(HostRingsTest, AnotherHostNeverMakesARequestSlower) {
  double worst = 0, sum = 0, worst_added = 0;
  int cases = 0;
  for (double host_link : {1.25e9, 3.125e9, 12.5e9, 50e9}) {
    for (int64_t tokens = 32769; tokens <= int64_t{1} << 21; tokens = tokens * 3 / 2) {
      double best = 0;
      for (int workers : {8, 16, 32}) {
        const Plan forced =
            MustPlan(Spec(tokens), Hosts({8, 8, 8, 8}, host_link), WorldSize(workers));
        const double seconds = forced.predicted_compute_seconds;
        best = best == 0 ? seconds : std::min(best, seconds);
      }
      double before = 0;
      for (const std::vector<int>& hosts :
           {std::vector<int>{8}, std::vector<int>{8, 8}, std::vector<int>{8, 8, 8, 8}}) {
        const double seconds =
            MustPlan(Spec(tokens), Hosts(hosts, host_link)).predicted_compute_seconds;
        if (before > 0) worst_added = std::max(worst_added, seconds / before);
        before = seconds;
      }
      worst = std::max(worst, before / best);
      sum += before / best;
      ++cases;
    }
  }
  RecordProperty("cases", cases);
  std::printf(
      "%d cases: choice / best at most %.3f, mean %.3f; with / without a host at most %.3f\n",
      cases, worst, sum / cases, worst_added);
  EXPECT_GE(cases, 40);
  EXPECT_LE(worst, 1.10);
  EXPECT_LE(sum / cases, 1.03);
  EXPECT_LE(worst_added, 1.0);
}

TEST(HostRingsTest, ASlowHostIsLeftOut) {
  PlannerInputs inputs = Hosts({8, 8}, 50e9);
  const int with_equal_hosts = MustPlan(Spec(1 << 20), inputs).shards.world_size;
  EXPECT_EQ(with_equal_hosts, 16);
  inputs.hosts[0].device_flops_per_s = inputs.device_flops_per_s = 6e13;
  EXPECT_EQ(MustPlan(Spec(1 << 20), inputs).shards.world_size, 8);
}

// Rates measured by chance must not choose the bits of a deterministic request.
TEST(HostRingsTest, DeterministicRequestsUseOneHost) {
  AttentionSpec spec = Spec(1 << 20);
  spec.options.deterministic = true;
  for (double host_link : {1e6, 1e9, 1e13}) {
    const Plan plan = MustPlan(spec, Hosts({4, 8}, host_link));
    EXPECT_EQ(plan.shards.world_size, 8);
    EXPECT_TRUE(plan.may_grow);
    EXPECT_TRUE(absl::StrContains(plan.reason, "deterministic")) << plan.reason;
  }
  PlanChoice grown;
  grown.min_world_size = 9;
  EXPECT_EQ(PlanRequest(spec, Direction::kForward, grown, Hosts({4, 8}, 1e9))->shards.world_size,
            12);
}

TEST(HostRingsTest, ARequestedSizeIsKeptAndItsLinksAreCounted) {
  const PlannerInputs inputs = Hosts({4, 4, 4}, 1e9);
  EXPECT_EQ(MustPlan(Spec(65536), inputs, WorldSize(4)).reason,
            "ring size 4 as requested; zigzag, which balances causal work");
  EXPECT_EQ(MustPlan(Spec(65536), inputs, WorldSize(6)).reason,
            "ring size 6 as requested, with 2 links between hosts; zigzag, which balances causal "
            "work");
  PlannerInputs interleaved = inputs;
  interleaved.host_of_member = {0, 1, 0, 1};
  EXPECT_TRUE(absl::StrContains(MustPlan(Spec(65536), interleaved, WorldSize(4)).reason,
                                "with 4 links between hosts"));
}

TEST(HostRingsTest, ARingThatLacksMemoryGrows) {
  PlanChoice choice;
  choice.min_world_size = 9;
  const Plan plan = MustPlan(Spec(65536), Hosts({8, 8}, 1e9), choice);
  EXPECT_EQ(plan.shards.world_size, 16);
  EXPECT_FALSE(plan.may_grow);
  EXPECT_TRUE(absl::StrContains(plan.reason, "rings of fewer than 9 workers lack the memory"))
      << plan.reason;
}

// Without causality all steps of a ring take the same bytes.
TEST(HostRingsTest, StepsBetweenHostsTakeTheRateBetweenHosts) {
  AttentionSpec spec = Spec(4096);
  spec.options.causal = false;
  PlannerInputs inputs = Hosts({2, 2}, 1e30);
  inputs.device_flops_per_s = inputs.link_bytes_per_s = 1e30;
  inputs.step_overhead_s = inputs.exchange_overhead_s = inputs.host_exchange_overhead_s = 0;
  const auto seconds = [&](int world_size, ScheduleKind schedule = ScheduleKind::kRing) {
    PlanChoice choice = WorldSize(world_size);
    choice.schedule = schedule;
    return MustPlan(spec, inputs, choice).predicted_compute_seconds;
  };
  EXPECT_LT(seconds(4), 1e-15);
  // K and V of 1,024 tokens are 4 MiB. Three steps exchange them over each link.
  const double block = 1024 * 8 * 2 * 128 * 2;
  inputs.host_link_bytes_per_s = block;
  EXPECT_NEAR(seconds(4), 3, 1e-9);
  EXPECT_LT(seconds(2), 1e-15);  // one host
  inputs.host_exchange_overhead_s = 2;
  EXPECT_NEAR(seconds(4), 3 * (1 + 2), 1e-9);
  // Links inside a host are used at the same time.
  inputs.link_bytes_per_s = block / 10;
  EXPECT_NEAR(seconds(4), 3 * 10, 1e-9);
  // All ranks of a host share its link: four blocks go out to the two ranks of the other host.
  inputs.link_bytes_per_s = 1e30;
  inputs.host_exchange_overhead_s = 0;
  EXPECT_NEAR(seconds(4, ScheduleKind::kAllGather), 4, 1e-9);
}

}  // namespace
}  // namespace ringattn
