// Tests of when the planner chooses a double ring, and in which groups.
#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "common/plan/planner.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

AttentionSpec SpecOfTokens(int64_t tokens) {
  AttentionSpec spec;
  spec.dtype = DType::kBFloat16;
  spec.shape.num_heads = 32;
  spec.shape.num_kv_heads = 8;
  spec.shape.head_dim = spec.shape.head_dim_v = 128;
  spec.shape.seq_len_q = spec.shape.seq_len_kv = tokens;
  spec.shape.cu_seqlens_q = spec.shape.cu_seqlens_k = {0, tokens};
  spec.options.causal = true;
  return spec;
}

// GPUs with NVLink, and `host_link` bytes per second out of a host.
PlannerInputs GpuHosts(const std::vector<int>& workers, double host_link) {
  PlannerInputs inputs;
  inputs.device_flops_per_s = 6e14;
  inputs.link_bytes_per_s = 3e11;
  inputs.step_overhead_s = 5e-6;
  inputs.exchange_overhead_s = 5e-6;
  inputs.host_link_bytes_per_s = host_link;
  inputs.host_exchange_overhead_s = 2e-5;
  inputs.ready_workers = 0;
  for (int count : workers) {
    inputs.ready_workers += count;
    inputs.hosts.push_back({count, 6e14, 3e11, 5e-6, 5e-6});
  }
  return inputs;
}

absl::StatusOr<Plan> PlanFor(int64_t tokens, const PlannerInputs& inputs, const PlanChoice& choice,
                             bool deterministic = false) {
  AttentionSpec spec = SpecOfTokens(tokens);
  spec.options.deterministic = deterministic;
  return PlanRequest(spec, Direction::kForward, choice, inputs);
}

TEST(DoubleRingPlanTest, IsChosenWhereTheLinkBetweenHostsIsExposed) {
  // 8,192 tokens per GPU: the hop takes 3.4 ms, a step 0.9 ms.
  PlanChoice all;
  all.world_size = 16;
  const Plan plan = *PlanFor(131072, GpuHosts({8, 8}, 1e10), all);
  EXPECT_EQ(plan.recipe.schedule, ScheduleKind::kDoubleRing);
  EXPECT_EQ(plan.recipe.group_size, 8);
  EXPECT_TRUE(absl::StrContains(plan.reason, "double_ring in groups of 8, predicted "))
      << plan.reason;
  EXPECT_TRUE(absl::StrContains(plan.reason, " s in one ring")) << plan.reason;
  PlanChoice flat = all;
  flat.schedule = ScheduleKind::kRing;
  const Plan in_one_ring = *PlanFor(131072, GpuHosts({8, 8}, 1e10), flat);
  EXPECT_EQ(in_one_ring.recipe.schedule, ScheduleKind::kRing);
  EXPECT_EQ(in_one_ring.recipe.group_size, 0);
  EXPECT_LT(plan.predicted_compute_seconds, in_one_ring.predicted_compute_seconds);
}

TEST(DoubleRingPlanTest, MakesASecondHostWorthwhileForShorterRequests) {
  const PlannerInputs inputs = GpuHosts({8, 8}, 1.6e10);
  const Plan plan = *PlanFor(131072, inputs, {});
  PlanChoice flat;
  flat.schedule = ScheduleKind::kRing;
  EXPECT_EQ(PlanFor(131072, inputs, flat)->shards.world_size, 8);
  EXPECT_EQ(plan.shards.world_size, 16) << plan.reason;
  EXPECT_EQ(plan.recipe.schedule, ScheduleKind::kDoubleRing) << plan.reason;
}

// With one card per GPU, all workers of a host together send eight times as much as one of them.
TEST(DoubleRingPlanTest, UsesTheRateOfAllWorkersOfAHost) {
  PlannerInputs cards = GpuHosts({8, 8}, 1.25e10);
  const Plan shared = *PlanFor(65536, cards, {});
  EXPECT_EQ(shared.shards.world_size, 8) << shared.reason;
  cards.host_total_bytes_per_s = 1e11;
  const Plan plan = *PlanFor(65536, cards, {});
  EXPECT_EQ(plan.shards.world_size, 16) << plan.reason;
  EXPECT_EQ(plan.recipe.schedule, ScheduleKind::kDoubleRing) << plan.reason;
  EXPECT_TRUE(absl::StrContains(
      plan.reason, "with 1.25e+10 bytes/s between hosts and 1e+11 from all workers of a host"))
      << plan.reason;
  // A flat ring uses one card of each host.
  PlanChoice flat{.schedule = ScheduleKind::kRing, .world_size = 16};
  const double one_card = PlanFor(65536, cards, flat)->predicted_compute_seconds;
  cards.host_total_bytes_per_s = 0;
  EXPECT_EQ(PlanFor(65536, cards, flat)->predicted_compute_seconds, one_card);
  // A total below the rate of one worker does not count.
  const double shared_seconds =
      PlanFor(65536, cards, {.schedule = ScheduleKind::kDoubleRing, .world_size = 16})
          ->predicted_compute_seconds;
  cards.host_total_bytes_per_s = 1e9;
  EXPECT_EQ(PlanFor(65536, cards, {.schedule = ScheduleKind::kDoubleRing, .world_size = 16})
                ->predicted_compute_seconds,
            shared_seconds);
}

TEST(DoubleRingPlanTest, IsNotChosenForUnequalHostsOrDeterministicRequestsOrOneHost) {
  PlanChoice all;
  all.world_size = 6;
  EXPECT_EQ(PlanFor(65536, GpuHosts({4, 2}, 1e10), all)->recipe.schedule, ScheduleKind::kRing);
  all.world_size = 8;
  EXPECT_EQ(PlanFor(65536, GpuHosts({4, 4}, 1e10), all, true)->recipe.schedule,
            ScheduleKind::kRing);
  EXPECT_EQ(PlanFor(65536, GpuHosts({8}, 1e10), all)->recipe.schedule, ScheduleKind::kRing);
  // One worker per host: there is nothing to group.
  EXPECT_EQ(PlanFor(65536, GpuHosts({1, 1, 1, 1, 1, 1, 1, 1}, 1e10), all)->recipe.schedule,
            ScheduleKind::kRing);
}

TEST(DoubleRingPlanTest, AClientMayAskForIt) {
  PlanChoice choice;
  choice.schedule = ScheduleKind::kDoubleRing;
  choice.world_size = 8;
  // The members of a host are a group.
  EXPECT_EQ(PlanFor(65536, GpuHosts({4, 4}, 1e10), choice)->recipe.group_size, 4);
  EXPECT_EQ(PlanFor(65536, GpuHosts({4, 4}, 1e10), choice, true)->recipe.group_size, 4);
  EXPECT_EQ(PlanFor(65536, GpuHosts({8}, 1e10), choice)->recipe.group_size, 8);
  choice.group_size = 2;
  EXPECT_EQ(PlanFor(65536, GpuHosts({8}, 1e10), choice)->recipe.group_size, 2);
  // On one device it is `single`.
  choice.world_size = 1;
  const Plan alone = *PlanFor(1024, GpuHosts({8}, 1e10), choice);
  EXPECT_EQ(alone.recipe.schedule, ScheduleKind::kSingle);
  EXPECT_EQ(alone.recipe.group_size, 0);
}

TEST(DoubleRingPlanTest, GroupsThatDoNotFitAreRejectedByField) {
  PlanChoice choice;
  choice.schedule = ScheduleKind::kDoubleRing;
  choice.world_size = 6;
  absl::Status status = PlanFor(65536, GpuHosts({4, 2}, 1e10), choice).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "plan.schedule: is double_ring")) << status;
  choice.group_size = 4;
  status = PlanFor(65536, GpuHosts({4, 2}, 1e10), choice).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_EQ(status.message(), "plan.group_size: is 4: must divide the ring size, 6");
  // Named members whose hosts alternate have no groups of neighbours.
  choice.group_size = 0;
  choice.world_size = 4;
  PlannerInputs inputs = GpuHosts({2, 2}, 1e10);
  inputs.host_of_member = {0, 1, 0, 1};
  status = PlanFor(65536, inputs, choice).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
}

}  // namespace
}  // namespace ringattn
