#include "worker/service/operation_runner.h"

#include "common/schedule/schedule.h"
#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

ComputeCall CallOf(ComputeCall::Op op, int64_t pairs) {
  ComputeCall call;
  call.op = op;
  call.pairs = pairs;
  return call;
}

AttentionSpec SpecOf(int64_t head_dim) {
  AttentionSpec spec;
  spec.shape.batch = 2;
  spec.shape.num_heads = 3;
  spec.shape.head_dim = spec.shape.head_dim_v = head_dim;
  return spec;
}

TEST(IsShort, CountsTheWorkOfAllStepsAndAcceptsNoPeers) {
  constexpr int64_t kPairs = 50'000;  // times 2 x 64: 6.4 million multiplications
  Program program;
  program.steps.push_back({{}, {CallOf(ComputeCall::Op::kForward, kPairs)}});
  program.steps.push_back({{}, {CallOf(ComputeCall::Op::kForward, kPairs)}});
  AttentionSpec spec = SpecOf(64);
  spec.shape.batch = spec.shape.num_heads = spec.shape.num_kv_heads = 1;
  EXPECT_TRUE(IsShort(spec, program));
  program.steps.push_back({{}, {CallOf(ComputeCall::Op::kForward, kPairs)}});
  EXPECT_FALSE(IsShort(spec, program));
  program.steps.resize(1);
  EXPECT_TRUE(IsShort(spec, program));
  program.steps[0].transfers.emplace_back();
  EXPECT_FALSE(IsShort(spec, program));
}

// A backward on one device is one step: without counting tiles its progress would stay 0 until the
// end.
TEST(FractionDone, GrowsWithTilesOfASingleStep) {
  Program program;
  program.steps.push_back(
      {{}, {CallOf(ComputeCall::Op::kDelta, 0), CallOf(ComputeCall::Op::kBackward, 1000)}});
  const int64_t all = 1000 * 2 * 3 * 5 * 64;
  EXPECT_EQ(FractionDone(SpecOf(64), program, 0, 0), 0.0);
  EXPECT_EQ(FractionDone(SpecOf(64), program, 0, 1), 0.0);
  EXPECT_EQ(FractionDone(SpecOf(64), program, all / 4, 1), 0.25);
  EXPECT_EQ(FractionDone(SpecOf(64), program, all, 1), 1.0);
  EXPECT_EQ(FractionDone(SpecOf(64), program, 2 * all, 2), 1.0);
}

// Calls that report no work until they end (CUDA) count by their cost when they end.
TEST(FractionDone, CountsCallsThatHaveEnded) {
  Program program;
  program.steps.push_back({{}, {CallOf(ComputeCall::Op::kForward, 500)}});
  program.steps.push_back(
      {{}, {CallOf(ComputeCall::Op::kZero, 0), CallOf(ComputeCall::Op::kBackward, 200)}});
  EXPECT_EQ(FractionDone(SpecOf(8), program, 0, 1), 0.5);
  EXPECT_EQ(FractionDone(SpecOf(8), program, 0, 2), 0.5);
  EXPECT_EQ(FractionDone(SpecOf(8), program, 0, 3), 1.0);
}

// Calls of some heads count the work of those heads only.
TEST(FractionDone, HeadGroupsAddUpToAllHeads) {
  AttentionSpec spec = SpecOf(64);
  spec.shape.num_heads = 8;
  spec.shape.num_kv_heads = 4;
  Program program;
  for (int64_t head = 0; head < 4; ++head) {
    program.steps.push_back({{}, {CallOf(ComputeCall::Op::kForward, 1000)}});
    program.steps.back().calls[0].heads = {head, 1, 4};
  }
  EXPECT_EQ(FractionDone(spec, program, 1000 * 2 * 8 * 2 * 64, 0), 1.0);
  EXPECT_EQ(FractionDone(spec, program, 1000 * 2 * 2 * 2 * 64, 1), 0.25);
  EXPECT_EQ(FractionDone(spec, program, 0, 3), 0.75);
}

// One part of a dilated problem has two thirds of the pairs but one third of the heads' work.
TEST(FractionDone, DilatedPartsCountTheirOwnHeads) {
  AttentionSpec spec = SpecOf(64);
  spec.shape.num_heads = 8;
  spec.shape.num_kv_heads = 4;
  Program program;
  for (const int64_t heads : {2, 8}) {
    program.steps.push_back({{}, {CallOf(ComputeCall::Op::kForward, heads == 2 ? 2000 : 1000)}});
    ComputeCall& call = program.steps.back().calls[0];
    call.part = static_cast<int>(program.steps.size()) - 1;
    call.part_query_heads = heads;
    call.of_query_heads = spec.shape.num_heads;
  }
  const int64_t first = 2000 * 2 * 2 * 2 * 64, second = 1000 * 2 * 8 * 2 * 64;
  EXPECT_DOUBLE_EQ(FractionDone(spec, program, 0, 1), 1.0 / 3);
  EXPECT_DOUBLE_EQ(FractionDone(spec, program, first, 0), 1.0 / 3);
  EXPECT_DOUBLE_EQ(FractionDone(spec, program, first + second, 1), 1.0);
}

// The figures of MakeSchedule: three levels, some of whose parts have one or two of eight heads.
TEST(FractionDone, CountsWorkOfDilatedLevels) {
  AttentionSpec spec = SpecOf(64);
  spec.shape.num_heads = spec.shape.num_kv_heads = 8;
  spec.shape.seq_len_q = spec.shape.seq_len_kv = 96;
  spec.shape.cu_seqlens_q = spec.shape.cu_seqlens_k = {0, 96};
  spec.options.dilation_levels = {{96, 1, std::nullopt, 0, 8}, {48, 5, std::nullopt, 0, 8}};
  const ShardPlan plan = MakeShardPlan(spec, Layout::kContiguous, 1);
  const Schedule schedule =
      MakeSchedule(spec, plan, RecipeOn(plan, ScheduleKind::kSingle, Direction::kForward));
  // At level 0 all pairs are visible. At level 1 each head sees 10 of 48 positions on either side,
  // except for offsets 3 and 4, which see 9: heads 3 and 4 only.
  const int64_t pairs = 8 * 96 * 96 + 2 * (6 * 10 * 10 + 2 * 9 * 9);
  const int64_t work = pairs * 2 * 2 * 64;
  EXPECT_DOUBLE_EQ(FractionDone(spec, schedule.programs[0], work / 2, 0), 0.5);
  EXPECT_DOUBLE_EQ(FractionDone(spec, schedule.programs[0], work, 0), 1.0);
}

TEST(FractionDone, ProgramWithoutPairsCountsCalls) {
  Program program;
  program.steps.push_back({{}, {CallOf(ComputeCall::Op::kZero, 0)}});
  EXPECT_EQ(FractionDone(SpecOf(8), program, 0, 0), 0.0);
  EXPECT_EQ(FractionDone(SpecOf(8), program, 0, 1), 1.0);
  EXPECT_EQ(FractionDone(SpecOf(8), Program(), 0, 0), 1.0);
}

}  // namespace
}  // namespace ringattn::worker
