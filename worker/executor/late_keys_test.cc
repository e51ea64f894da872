#include "worker/executor/late_keys.h"

#include <cstdint>
#include <set>
#include <string>

#include "common/schedule/schedule.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

constexpr int64_t kTokens = 4096;

AttentionSpec Spec() {
  AttentionSpec spec;
  spec.dtype = DType::kBFloat16;
  spec.shape.seq_len_q = spec.shape.seq_len_kv = kTokens;
  spec.shape.cu_seqlens_q = spec.shape.cu_seqlens_k = {0, kTokens};
  spec.shape.num_heads = spec.shape.num_kv_heads = 2;
  spec.shape.head_dim = spec.shape.head_dim_v = 64;
  spec.options.causal = true;
  return spec;
}

struct Ring {
  explicit Ring(int size, AttentionSpec the_spec = Spec(), Layout layout = Layout::kZigzag)
      : spec(std::move(the_spec)), plan(MakeShardPlan(spec, layout, size)) {}
  Program ForwardOf(int rank, bool keeps_inputs = false) const {
    ProgramRecipe recipe = RecipeOn(plan, ScheduleKind::kRing, Direction::kForward);
    recipe.keeps_inputs = keeps_inputs;
    return MakeProgram(spec, plan, recipe, rank);
  }
  AttentionSpec spec;
  ShardPlan plan;
};

Program Join(Program program, bool takes = true) {
  return JoinLateKeys(std::move(program), [takes](const ComputeCall&) { return takes; });
}

int CallsOf(const Program& program) {
  int calls = 0;
  for (const Step& step : program.steps) calls += static_cast<int>(step.calls.size());
  return calls;
}

int64_t BytesOf(const Program& program, const std::string& name) {
  for (const BufferSpec& buffer : program.buffers) {
    if (buffer.name == name) return buffer.bytes;
  }
  return -1;
}

TEST(LateKeys, MergesTwoStepsWithoutPartialResult) {
  const Ring ring(2);
  for (int rank = 0; rank < 2; ++rank) {
    const Program before = ring.ForwardOf(rank);
    const Program after = Join(before);
    ASSERT_EQ(before.steps.size(), 2u);
    ASSERT_EQ(after.steps.size(), 2u) << "peers count them";
    EXPECT_EQ(after.steps[0].transfers.size(), before.steps[0].transfers.size());
    ASSERT_EQ(CallsOf(before), 2);
    ASSERT_EQ(CallsOf(after), 1);
    const ComputeCall& call = after.steps[0].calls[0];
    EXPECT_TRUE(call.initial && call.final);
    EXPECT_EQ(call.q.out_acc, kNone);
    EXPECT_EQ(call.q.out, before.steps[1].calls[0].q.out);
    EXPECT_EQ(after.PairCount(), before.PairCount());
    EXPECT_EQ(after.TileCount(), before.TileCount());
    int late = 0;
    for (const KvOperand& keys : call.kv) {
      EXPECT_GE(keys.late, late) << "late keys come last";
      late = keys.late;
      EXPECT_EQ(keys.late, keys.source_rank != rank ? 1 : 0);
    }
    EXPECT_EQ(late, 1);
    EXPECT_GT(LongerWayBytes(after.steps[0], Lane::kInside), 0);
    EXPECT_EQ(LongerWayBytes(after.steps[1], Lane::kInside), 0);
    EXPECT_GT(BytesOf(before, "out_acc"), 0);
    EXPECT_EQ(BytesOf(after, "out_acc"), 0);
  }
}

// A rank between two ranks of its host waits on the device, and ranks next to another host do not.
TEST(LateKeys, KeepsStepsWhoseTransfersUseComputeUnits) {
  const Ring ring(4);
  const auto calls_with = [&](int rank, std::set<int> takes_units) {
    return CallsOf(JoinLateKeys(
        ring.ForwardOf(rank), [](const ComputeCall&) { return true; },
        [&takes_units](int peer) { return takes_units.count(peer) > 0; }));
  };
  const int separate = CallsOf(ring.ForwardOf(1)), merged = calls_with(1, {});
  EXPECT_LT(merged, separate);
  EXPECT_EQ(calls_with(1, {3}), merged) << "it exchanges with ranks 0 and 2 only";
  EXPECT_EQ(calls_with(1, {0}), separate);
  EXPECT_EQ(calls_with(1, {2}), separate);
}

TEST(LateKeys, GatheredKeysStartWithOwnKeys) {
  const AttentionSpec spec = Spec();
  const ShardPlan plan = MakeShardPlan(spec, Layout::kZigzag, 4);
  for (int rank = 0; rank < 4; ++rank) {
    const Program before = MakeProgram(
        spec, plan, RecipeOn(plan, ScheduleKind::kAllGather, Direction::kForward), rank);
    ASSERT_EQ(before.steps.size(), 2u);
    ASSERT_TRUE(before.steps[0].calls.empty());
    const Program after = Join(before);
    ASSERT_EQ(after.steps.size(), 2u);
    EXPECT_TRUE(after.steps[1].calls.empty());
    ASSERT_EQ(after.steps[0].calls.size(), 1u);
    const ComputeCall& call = after.steps[0].calls[0];
    EXPECT_TRUE(call.initial && call.final);
    ASSERT_EQ(call.kv.size(), before.steps[1].calls[0].kv.size());
    for (size_t i = 0; i < call.kv.size(); ++i) {
      EXPECT_EQ(call.kv[i].late, call.kv[i].source_rank != rank ? 1 : 0);
      EXPECT_EQ(call.kv[i].late > 0, i > 0) << "the rank's own keys come first";
    }
    EXPECT_EQ(after.PairCount(), before.PairCount());
    EXPECT_EQ(CallsOf(Join(before, /*takes=*/false)), 1);
    EXPECT_TRUE(Join(before, /*takes=*/false).steps[0].calls.empty());
  }
}

// Gathered heads are computed while the next ones travel. The local copies between them keep the
// calls apart.
TEST(LateKeys, KeepsHeadsGatheredInTurn) {
  const AttentionSpec spec = Spec();
  const ShardPlan plan = MakeShardPlan(spec, Layout::kZigzag, 2);
  ProgramRecipe recipe = RecipeOn(plan, ScheduleKind::kAllGather, Direction::kForward);
  recipe.heads_per_step = 1;
  for (const Step& step : Join(MakeProgram(spec, plan, recipe, 0)).steps) {
    for (const ComputeCall& call : step.calls) {
      for (const KvOperand& keys : call.kv) EXPECT_EQ(keys.late, 0);
    }
  }
}

// The rank owns none of the keys that its queries see.
TEST(LateKeys, CallWithoutOwnKeysWaitsForItsStep) {
  AttentionSpec spec = Spec();
  spec.shape.seq_len_kv = 16;  // all in rank 0's shard under the contiguous layout
  spec.shape.cu_seqlens_k = {0, 16};
  spec.options.causal = false;
  const ShardPlan plan = MakeShardPlan(spec, Layout::kContiguous, 2);
  for (int rank = 0; rank < 2; ++rank) {
    SCOPED_TRACE(rank);
    const Program before = MakeProgram(
        spec, plan, RecipeOn(plan, ScheduleKind::kAllGather, Direction::kForward), rank);
    const Program after = Join(before);
    for (const Step& step : after.steps) {
      for (const ComputeCall& call : step.calls) {
        EXPECT_FALSE(!call.kv.empty() && call.kv.front().late > 0);
      }
    }
  }
}

TEST(LateKeys, KeepsCallsThatDeviceCannotMerge) {
  const Ring ring(2);
  const Program program = Join(ring.ForwardOf(0), /*takes=*/false);
  EXPECT_EQ(CallsOf(program), 2);
  EXPECT_GT(BytesOf(program, "out_acc"), 0);
}

int64_t BytesOf(const Program& program) {
  int64_t bytes = 0;
  for (const BufferSpec& buffer : program.buffers) bytes += buffer.bytes;
  return bytes;
}

// Blocks that would overwrite earlier ones get separate memory. Partial results need no memory.
TEST(LateKeys, JoinsAllStepsOfALongerRing) {
  AttentionSpec grouped = Spec();
  grouped.shape.num_heads = 8;
  for (const int size : {3, 4}) {
    const Ring ring(size, grouped);
    for (int rank = 0; rank < size; ++rank) {
      SCOPED_TRACE(rank);
      const Program before = ring.ForwardOf(rank);
      const Program after = Join(before);
      ASSERT_EQ(CallsOf(before), size);
      ASSERT_EQ(CallsOf(after), 1);
      ASSERT_EQ(after.steps.size(), before.steps.size());
      for (size_t step = 0; step < after.steps.size(); ++step) {
        const std::vector<Transfer>& found = after.steps[step].transfers;
        const std::vector<Transfer>& expected = before.steps[step].transfers;
        ASSERT_EQ(found.size(), expected.size());
        for (size_t i = 0; i < found.size(); ++i) {
          EXPECT_EQ(found[i].kind, expected[i].kind);
          EXPECT_EQ(found[i].peer, expected[i].peer);
          EXPECT_EQ(found[i].range.bytes, expected[i].range.bytes);
        }
      }
      const ComputeCall& call = after.steps[0].calls[0];
      EXPECT_TRUE(call.initial && call.final);
      EXPECT_EQ(call.q.out_acc, kNone);
      int late = 0;
      for (const KvOperand& keys : call.kv) {
        EXPECT_EQ(keys.late, (rank - keys.source_rank + size) % size);
        EXPECT_GE(keys.late, late) << "in the order of arrival";
        late = keys.late;
      }
      EXPECT_EQ(late, size - 1);
      EXPECT_EQ(BytesOf(after, "out_acc"), 0);
      EXPECT_LT(BytesOf(after), BytesOf(before));
      EXPECT_EQ(after.PairCount(), before.PairCount());
    }
  }
}

// The third block overwrites the rank's own block and must not wait for the end of a merged call.
// Separate memory for each block would be more than partial results take. The first call therefore
// stays separate. The last two can merge.
TEST(LateKeys, TransferIntoFirstCallsKeysPreventsMerge) {
  AttentionSpec full = Spec();
  full.options.causal = false;
  full.shape.num_heads = 1;
  full.shape.num_kv_heads = 1;
  full.shape.head_dim_v = 16;
  const Ring ring(3, full, Layout::kContiguous);
  const Program relayed = Join(ring.ForwardOf(0));
  ASSERT_EQ(CallsOf(relayed), 2);
  EXPECT_EQ(relayed.steps[0].calls[0].kv.size(), 1u);
  EXPECT_EQ(relayed.steps[1].calls[0].kv[0].late, 0);
  EXPECT_EQ(relayed.steps[1].calls[0].kv[1].late, 1);
  EXPECT_TRUE(relayed.steps[1].calls[0].final);
  // If the rank's own block is kept, all three can merge.
  const Program kept = Join(ring.ForwardOf(0, /*keeps_inputs=*/true));
  EXPECT_EQ(CallsOf(kept), 1);
  EXPECT_EQ(BytesOf(kept, "out_acc"), 0);
}

// With blocks in separate memory, a device that takes the keys of two steps at a time could do
// with two calls. That would take more memory than the plan predicts, because partial results
// remain.
TEST(LateKeys, TakesNoMoreMemoryThanBefore) {
  AttentionSpec grouped = Spec();
  grouped.shape.num_heads = 8;
  const Program before = Ring(4, grouped).ForwardOf(0);
  const Program program =
      JoinLateKeys(before, [](const ComputeCall& call) { return call.kv.back().late < 2; });
  EXPECT_EQ(CallsOf(program), 3);
  EXPECT_GT(BytesOf(program, "out_acc"), 0);
  EXPECT_LE(BytesOf(program), BytesOf(before));
}

// A window shorter than a shard: only rows of the neighbouring rank are needed.
TEST(LateKeys, ShortWindowsNeedTwoStepsOnAnyRing) {
  AttentionSpec spec = Spec();
  spec.options.window_left = 100;
  spec.options.window_right = 0;
  const Ring ring(4, spec, Layout::kContiguous);
  EXPECT_EQ(CallsOf(Join(ring.ForwardOf(0))), 1);  // sees only its own keys
  const Program second = Join(ring.ForwardOf(1));
  EXPECT_EQ(CallsOf(ring.ForwardOf(1)), 2);
  EXPECT_EQ(CallsOf(second), 1);
}

TEST(LateKeys, ProbabilitiesBetweenCallsPreventMerge) {
  AttentionSpec spec = Spec();
  spec.probability_rows = {{0, kTokens - 1}};
  const Ring ring(2, spec);
  for (int rank = 0; rank < 2; ++rank) {
    const Program before = ring.ForwardOf(rank);
    bool has = false;
    for (const Step& step : before.steps) {
      for (const ComputeCall& call : step.calls) has |= call.op == ComputeCall::Op::kProbabilities;
    }
    if (has) {
      EXPECT_EQ(CallsOf(Join(before)), CallsOf(before));
    }
  }
}

TEST(LateKeys, SelfTransferPreventsMerge) {
  Program program = Ring(2).ForwardOf(0);
  program.steps[0].transfers.push_back({Transfer::Kind::kSend, 0, {0, 0, 1}});
  EXPECT_EQ(CallsOf(Join(program)), 2);
}

TEST(LateKeys, SlowLanePreventsMerge) {
  Program program = Ring(2).ForwardOf(0);
  AssignLanes({0, 1}, program);
  const auto takes = [](const ComputeCall&) { return true; };
  const auto takes_units = [](int) { return false; };
  const auto only = [](Lane lane) { return [lane](Lane asked) { return asked == lane; }; };
  EXPECT_EQ(CallsOf(JoinLateKeys(program, takes, takes_units, only(Lane::kBetween))), 1);
  EXPECT_EQ(CallsOf(JoinLateKeys(program, takes, takes_units, only(Lane::kInside))), 2);
  EXPECT_GT(LongerWayBytes(program.steps[0], Lane::kBetween), 0);
  EXPECT_EQ(LongerWayBytes(program.steps[0], Lane::kInside), 0);
}

// Gradients are sent between the calls of a backward, so these stay. Its recomputed forward is
// merged.
TEST(LateKeys, KeepsBackwardCalls) {
  const Ring ring(2);
  for (const bool recompute : {false, true}) {
    const Program before =
        MakeProgram(ring.spec, ring.plan,
                    RecipeOn(ring.plan, ScheduleKind::kRing, Direction::kBackward, recompute), 0);
    EXPECT_EQ(CallsOf(Join(before)), CallsOf(before) - (recompute ? 1 : 0));
  }
}

}  // namespace
}  // namespace ringattn::worker
