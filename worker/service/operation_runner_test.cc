#include "worker/service/operation_runner.h"

#include "common/plan/schedule.h"
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

// A backward of one device is one step: without the tiles it would be at 0 to its end.
TEST(FractionDone, GrowsWithTheTilesOfTheOnlyStep) {
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

// Calls that say nothing until they end (CUDA) count when they do, by what they cost.
TEST(FractionDone, CountsCallsThatHaveEnded) {
  Program program;
  program.steps.push_back({{}, {CallOf(ComputeCall::Op::kForward, 500)}});
  program.steps.push_back(
      {{}, {CallOf(ComputeCall::Op::kZero, 0), CallOf(ComputeCall::Op::kBackward, 200)}});
  EXPECT_EQ(FractionDone(SpecOf(8), program, 0, 1), 0.5);
  EXPECT_EQ(FractionDone(SpecOf(8), program, 0, 2), 0.5);
  EXPECT_EQ(FractionDone(SpecOf(8), program, 0, 3), 1.0);
}

// Calls of some heads cost those heads alone.
TEST(FractionDone, GroupsOfHeadsAddUpToAllHeads) {
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

TEST(FractionDone, AProgramWithoutPairsIsDoneWhenItsCallsAre) {
  Program program;
  program.steps.push_back({{}, {CallOf(ComputeCall::Op::kZero, 0)}});
  EXPECT_EQ(FractionDone(SpecOf(8), program, 0, 0), 0.0);
  EXPECT_EQ(FractionDone(SpecOf(8), program, 0, 1), 1.0);
  EXPECT_EQ(FractionDone(SpecOf(8), Program(), 0, 0), 1.0);
}

}  // namespace
}  // namespace ringattn::worker
