#include "server/core/requests/plan_summary.h"

#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

AttentionSpec Documents(int64_t count, int64_t length) {
  AttentionSpec spec;
  spec.shape.packed = true;
  spec.shape.seq_len_q = spec.shape.seq_len_kv = count * length;
  for (int64_t i = 0; i <= count; ++i) {
    spec.shape.cu_seqlens_q.push_back(i * length);
    spec.shape.cu_seqlens_k.push_back(i * length);
  }
  return spec;
}

PlannerInputs Workers(int count) {
  PlannerInputs inputs;
  inputs.ready_workers = count;
  return inputs;
}

TEST(PlanSummaryTest, ShardsOfReversesWithoutSpans) {
  const AttentionSpec spec = Documents(100, 7);
  for (const Layout layout :
       {Layout::kContiguous, Layout::kZigzag, Layout::kStriped, Layout::kZigzagPerDocument}) {
    PlanChoice choice;
    choice.layout = layout;
    choice.world_size = 3;
    choice.stripe = layout == Layout::kStriped ? 5 : 1;
    const absl::StatusOr<Plan> plan = PlanRequest(spec, Direction::kForward, choice, Workers(3));
    ASSERT_TRUE(plan.ok()) << plan.status();
    const Plan summary = WithoutSpans(*plan);
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(RowsIn(summary.shards.q[rank]), RowsIn(plan->shards.q[rank]));
      EXPECT_EQ(RowsIn(summary.shards.kv[rank]), RowsIn(plan->shards.kv[rank]));
      EXPECT_LE(summary.shards.q[rank].size(), 1u);
    }
    const ShardPlan shards = ShardsOf(summary, spec);
    EXPECT_EQ(shards.q, plan->shards.q);
    EXPECT_EQ(shards.kv, plan->shards.kv);
  }
}

TEST(PlanSummaryTest, RanksWithoutRowsHaveNoSpan) {
  const AttentionSpec spec = Documents(1, 2);
  PlanChoice choice;
  choice.world_size = 4;
  const absl::StatusOr<Plan> plan = PlanRequest(spec, Direction::kForward, choice, Workers(4));
  ASSERT_TRUE(plan.ok()) << plan.status();
  const Plan summary = WithoutSpans(*plan);
  // Two tokens on four ranks.
  size_t spans = 0;
  for (const Shard& shard : summary.shards.q) spans += shard.size();
  EXPECT_EQ(spans, 2u);
}

// limits.h relies on it: 64 ranks take about 11 KiB, independent of the request's lists.
TEST(PlanSummaryTest, IsSmall) {
  AttentionSpec spec = Documents(1 << 12, 1 << 10);
  PlanChoice choice;
  choice.layout = Layout::kStriped;
  choice.stripe = 64;
  choice.world_size = 64;
  Plan plan;
  plan.shards = MakeShardPlan(spec, Layout::kStriped, 64, 64);
  for (std::vector<int64_t>* list :
       {&plan.buffer_bytes, &plan.workspace_bytes, &plan.tiles, &plan.sent_bytes}) {
    list->assign(64, 1);
  }
  EXPECT_GT(BytesOf(plan), 3 << 20);
  EXPECT_LT(BytesOf(WithoutSpans(plan)), 11 << 10);
}

}  // namespace
}  // namespace ringattn::server
