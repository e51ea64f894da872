// Tests which backward calls get hints, and that a device may take all hints of a program.
#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "common/schedule/gradient_store_hints.h"
#include "common/schedule/schedule.h"
#include "common/schedule/testing/schedule_cases.h"
#include "common/schedule/testing/schedule_simulator.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

std::map<ComputeCall::Op, int> CallsWithHints(const Schedule& schedule) {
  std::map<ComputeCall::Op, int> calls;
  for (const Program& program : schedule.programs) {
    for (const Step& step : program.steps) {
      for (const ComputeCall& call : step.calls) {
        if (call.store_hint != ComputeCall::kNoStoreHint) ++calls[call.op];
      }
    }
  }
  return calls;
}

// Runs the cases of schedule_test and takes every hint; schedule_test takes none.
void TakeAllHints(int seed, int count, int64_t longest) {
  std::map<ScheduleKind, int> offering;
  for (int i = 0; i < count; ++i) {
    std::mt19937 random(seed * 100000 + i);
    const ScheduleCase c = DrawScheduleCase(random, longest);
    if (c.recipe.direction != Direction::kBackward) continue;
    const Schedule schedule = c.Make();
    if (CallsWithHints(schedule).empty()) continue;
    ++offering[c.recipe.schedule];
    ScheduleSimulator simulator(c.spec, c.plan, schedule, /*takes_hints=*/true);
    ASSERT_EQ(simulator.Run(), "") << "seed " << seed << " case " << i << "\n"
                                   << Describe(c, schedule);
  }
  for (ScheduleKind kind : kAllScheduleKinds) {
    EXPECT_GT(offering[kind], 0) << ScheduleKindName(kind);
  }
}

TEST(GradientStoreHintsTest, ManyShortSequences) { TakeAllHints(1, 8000, 40); }

TEST(GradientStoreHintsTest, LongerSequences) { TakeAllHints(2, 600, 3000); }

// No hint if others' queries add to a key's gradient, if it travels, or if it is fp32.
TEST(GradientStoreHintsTest, GradientsThatOneCallHas) {
  AttentionSpec spec = DenseSpec(64, 64);
  spec.dtype = DType::kBFloat16;
  const auto hints = [&spec](ScheduleKind kind, int ranks) {
    const ShardPlan plan = MakeShardPlan(spec, Layout::kContiguous, ranks);
    return CallsWithHints(MakeSchedule(
        spec, plan, RecipeOn(plan, kind, Direction::kBackward, /*recompute_forward=*/true)));
  };
  const std::map<ComputeCall::Op, int> none;
  EXPECT_EQ(hints(ScheduleKind::kSingle, 1),
            (std::map<ComputeCall::Op, int>{{ComputeCall::Op::kBackward, 1},
                                            {ComputeCall::Op::kZero, 2},
                                            {ComputeCall::Op::kConvert, 2}}));
  EXPECT_EQ(hints(ScheduleKind::kRing, 2), none);
  EXPECT_EQ(hints(ScheduleKind::kAllGather, 2), none);
  EXPECT_EQ(hints(ScheduleKind::kPassQ, 2), none);
  spec.fp32_results = true;
  EXPECT_EQ(hints(ScheduleKind::kSingle, 1), none);
}

// Programs that no schedule builds. Buffers: dk's sums, dk, dv's sums, dv.
enum Buffers : BufferId { kDkSums, kDk, kDvSums, kDv };
constexpr int64_t kBytes = 64;  // of sums

ByteRange Whole(BufferId buffer) {
  return {buffer, 0, buffer == kDkSums || buffer == kDvSums ? kBytes : kBytes / 2};
}

ComputeCall Zero(BufferId buffer) {
  ComputeCall call;
  call.op = ComputeCall::Op::kZero;
  call.target = Whole(buffer);
  return call;
}

ComputeCall Convert(BufferId target, BufferId source) {
  ComputeCall call;
  call.op = ComputeCall::Op::kConvert;
  call.target = Whole(target);
  call.source = Whole(source);
  return call;
}

ComputeCall Backward(const ByteRange& dk, const ByteRange& dv) {
  ComputeCall call;
  call.op = ComputeCall::Op::kBackward;
  KvOperand& keys = call.kv.emplace_back();
  keys.dk = dk;
  keys.dv = dv;
  return call;
}

// Returns the hints of a program that zeroes the sums, runs these calls and converts the sums.
std::vector<ComputeCall> WithHints(std::vector<ComputeCall> calls) {
  Program program;
  program.buffers = {
      {"dk_acc", kBytes}, {"dk", kBytes / 2}, {"dv_acc", kBytes}, {"dv", kBytes / 2}};
  Step& step = program.steps.emplace_back();
  step.calls = {Zero(kDkSums), Zero(kDvSums)};
  step.calls.insert(step.calls.end(), calls.begin(), calls.end());
  step.calls.push_back(Convert(kDk, kDkSums));
  step.calls.push_back(Convert(kDv, kDvSums));
  AddStoreHints(program);
  return program.steps[0].calls;
}

int CountHints(const std::vector<ComputeCall>& calls) {
  return static_cast<int>(std::count_if(calls.begin(), calls.end(), [](const ComputeCall& call) {
    return call.store_hint != ComputeCall::kNoStoreHint;
  }));
}

TEST(GradientStoreHintsTest, ACallThatAloneAddsToAllOfTheSums) {
  const std::vector<ComputeCall> calls = WithHints({Backward(Whole(kDkSums), Whole(kDvSums))});
  for (const ComputeCall& call : calls) EXPECT_EQ(call.store_hint, 0) << OpName(call.op);
  EXPECT_EQ(calls[2].kv[0].dk_out, Whole(kDk));
  EXPECT_EQ(calls[2].kv[0].dv_out, Whole(kDv));
}

TEST(GradientStoreHintsTest, OperandsOfOneCallMayShareASum) {
  ComputeCall call = Backward({kDkSums, 0, kBytes / 2}, {kDvSums, 0, kBytes / 2});
  call.kv.push_back(
      Backward({kDkSums, kBytes / 2, kBytes / 2}, {kDvSums, kBytes / 2, kBytes / 2}).kv[0]);
  const std::vector<ComputeCall> calls = WithHints({call});
  EXPECT_EQ(CountHints(calls), 5);
  EXPECT_EQ(calls[2].kv[1].dk_out, (ByteRange{kDk, kBytes / 4, kBytes / 4}));
}

// A call that has keys of every rank.
TEST(GradientStoreHintsTest, ACallOfManyOperands) {
  constexpr int64_t kPart = 4;
  ComputeCall call = Backward({kDkSums, 0, kPart}, {kDvSums, 0, kPart});
  for (int64_t at = kPart; at < kBytes; at += kPart) {
    call.kv.push_back(Backward({kDkSums, at, kPart}, {kDvSums, at, kPart}).kv[0]);
  }
  const std::vector<ComputeCall> calls = WithHints({call});
  EXPECT_EQ(CountHints(calls), 5);
  int64_t at = 0;
  for (const KvOperand& keys : calls[2].kv) {
    EXPECT_EQ(keys.dk_out, (ByteRange{kDk, at, kPart / 2}));
    EXPECT_EQ(keys.dv_out, (ByteRange{kDv, at, kPart / 2}));
    at += kPart / 2;
  }
  call.kv.back().k = call.kv[0].dk;  // reads what another operand adds to
  EXPECT_EQ(CountHints(WithHints({call})), 0);
}

TEST(GradientStoreHintsTest, NotWhereAnotherCallAddsToTheSums) {
  const ComputeCall call = Backward(Whole(kDkSums), Whole(kDvSums));
  EXPECT_EQ(CountHints(WithHints({call, call})), 0);
  // Each call adds to one half, so neither may take over the conversion of both halves.
  const ByteRange dk_end{kDkSums, kBytes / 2, kBytes / 2}, dv_end{kDvSums, kBytes / 2, kBytes / 2};
  EXPECT_EQ(CountHints(WithHints({Backward({kDkSums, 0, kBytes / 2}, {kDvSums, 0, kBytes / 2}),
                                  Backward(dk_end, dv_end)})),
            0);
}

// Sums that no call adds to are 0 if they are zeroed and converted, and undefined otherwise.
TEST(GradientStoreHintsTest, NotWhereTheCallLeavesSomeOfTheSums) {
  EXPECT_EQ(CountHints(WithHints({Backward({kDkSums, 0, kBytes / 2}, Whole(kDvSums))})), 0);
}

TEST(GradientStoreHintsTest, NotWhereAnythingElseTouchesASumOrAResult) {
  const ComputeCall backward = Backward(Whole(kDkSums), Whole(kDvSums));
  for (BufferId touched : {kDkSums, kDk, kDvSums, kDv}) {
    ComputeCall add;
    add.op = ComputeCall::Op::kAdd;
    add.target = Whole(touched);
    EXPECT_EQ(CountHints(WithHints({backward, add})), 0) << touched;
  }
  EXPECT_EQ(CountHints(WithHints({backward, Convert(kDk, kDkSums)})), 0);
}

}  // namespace
}  // namespace ringattn
