#include <gtest/gtest.h>

#include <numeric>
#include <string>

#include "common/layout/dilation.h"
#include "common/schedule/schedule.h"
#include "common/schedule/testing/schedule_simulator.h"

namespace ringattn {
namespace {

AttentionSpec SpecOf(int64_t tokens, int64_t heads, std::vector<DilationLevel> levels) {
  AttentionSpec spec;
  spec.dtype = DType::kBFloat16;
  spec.shape.batch = 2;
  spec.shape.seq_len_q = spec.shape.seq_len_kv = tokens;
  spec.shape.num_heads = spec.shape.num_kv_heads = heads;
  spec.shape.head_dim = spec.shape.head_dim_v = 16;
  spec.shape.cu_seqlens_q = spec.shape.cu_seqlens_k = {0, tokens};
  spec.options.dilation_levels = std::move(levels);
  for (DilationLevel& level : spec.options.dilation_levels) level.head_end = heads;
  return spec;
}

// Sums the pairs of all ranks, per batch row, times the heads.
int64_t PairsOf(const Schedule& schedule, ComputeCall::Op op) {
  int64_t pairs = 0;
  for (const Program& program : schedule.programs) {
    for (const Step& step : program.steps) {
      for (const ComputeCall& call : step.calls) {
        if (call.op == op) pairs += call.pairs * call.part_query_heads;
      }
    }
  }
  return pairs;
}

int64_t SentBytes(const Schedule& schedule) {
  int64_t bytes = 0;
  for (const Program& program : schedule.programs) bytes += program.SentBytes();
  return bytes;
}

TEST(DilatedScheduleTest, ComputesThePairsOfItsLevelsAndNoMore) {
  // Four heads of every offset: n w / r^2 pairs each.
  const AttentionSpec spec = SpecOf(4096, 16, {{256, 1}, {1024, 2}, {4096, 4}});
  const int64_t expected = 16 * 4096 * (256 / 1 + 1024 / 4 + 4096 / 16);
  for (ScheduleKind kind : {ScheduleKind::kRing, ScheduleKind::kAllGather, ScheduleKind::kPassQ,
                            ScheduleKind::kReplicatedQ}) {
    for (Layout layout : {Layout::kContiguous, Layout::kZigzag, Layout::kStriped}) {
      const ShardPlan plan = MakeShardPlan(spec, layout, 4);
      const std::string what = std::string(ScheduleKindName(kind)) + " " + LayoutName(layout);
      const Schedule forward = MakeSchedule(spec, plan, RecipeOn(plan, kind, Direction::kForward));
      EXPECT_EQ(PairsOf(forward, ComputeCall::Op::kForward), expected) << what;
      int64_t counted = 0;
      for (const Program& program : forward.programs) counted += program.PairCount();
      EXPECT_EQ(counted, expected / 16) << what;
      const Schedule backward =
          MakeSchedule(spec, plan, RecipeOn(plan, kind, Direction::kBackward, true));
      EXPECT_EQ(PairsOf(backward, ComputeCall::Op::kForward), expected) << what;
      EXPECT_EQ(PairsOf(backward, ComputeCall::Op::kBackward), expected) << what;
    }
  }
}

TEST(DilatedScheduleTest, SegmentsWithinAShardExchangeNothing) {
  const AttentionSpec near = SpecOf(4096, 4, {{256, 1}, {1024, 2}});
  const ShardPlan plan = MakeShardPlan(near, Layout::kContiguous, 4);
  for (Direction direction : {Direction::kForward, Direction::kBackward}) {
    EXPECT_EQ(SentBytes(MakeSchedule(near, plan, RecipeOn(plan, ScheduleKind::kRing, direction))),
              0);
  }
  // A level that crosses ranks sends the tokens and heads that it selects: half of each for its two
  // offsets, so half of what plain attention sends.
  const AttentionSpec far = SpecOf(4096, 4, {{256, 1}, {4096, 2}});
  AttentionSpec plain = far;
  plain.options.dilation_levels.clear();
  const int64_t sent =
      SentBytes(MakeSchedule(far, plan, RecipeOn(plan, ScheduleKind::kRing, Direction::kForward)));
  const int64_t all = SentBytes(
      MakeSchedule(plain, plan, RecipeOn(plan, ScheduleKind::kRing, Direction::kForward)));
  EXPECT_GT(sent, 0);
  EXPECT_EQ(2 * sent, all);
}

int64_t StepsWithTransfers(const Schedule& schedule) {
  int64_t steps = 0;
  for (const Step& step : schedule.programs[0].steps) steps += step.transfers.empty() ? 0 : 1;
  return steps;
}

std::vector<ComputeCall> CallsOf(const Program& program, ComputeCall::Op op) {
  std::vector<ComputeCall> calls;
  for (const Step& step : program.steps) {
    for (const ComputeCall& call : step.calls) {
      if (call.op == op) calls.push_back(call);
    }
  }
  return calls;
}

// The parts of a level share one exchange and one call for their results.
TEST(DilatedScheduleTest, ALevelsPartsGoSideBySide) {
  const AttentionSpec spec = SpecOf(4096, 8, {{4096, 8}});
  for (ScheduleKind kind : {ScheduleKind::kRing, ScheduleKind::kAllGather, ScheduleKind::kPassQ,
                            ScheduleKind::kReplicatedQ}) {
    const ShardPlan plan = MakeShardPlan(spec, Layout::kContiguous, 4);
    const std::vector<DilatedPart> parts = DilatedPartsOf(spec, plan);
    ASSERT_EQ(parts.size(), 8u);
    for (Direction direction : {Direction::kForward, Direction::kBackward}) {
      const std::string what = ScheduleKindName(kind);
      const Schedule all = MakeSchedule(spec, plan, RecipeOn(plan, kind, direction));
      const Schedule one =
          MakeSchedule(parts[0].spec, parts[0].plan, RecipeOn(parts[0].plan, kind, direction));
      EXPECT_EQ(StepsWithTransfers(all), StepsWithTransfers(one)) << what;
      EXPECT_GT(StepsWithTransfers(all), 0) << what;
      for (const Program& program : all.programs) {
        const bool backward = direction == Direction::kBackward;
        const auto op = backward ? ComputeCall::Op::kScatterAdd : ComputeCall::Op::kScatterMerge;
        const std::vector<ComputeCall> results = CallsOf(program, op);
        EXPECT_EQ(results.size(), backward ? 3u : 1u) << what;
        for (const ComputeCall& call : results) {
          EXPECT_EQ(call.parts.size(), 8u) << what;
          EXPECT_TRUE(call.initial && call.final) << what;
        }
        // No sum of the whole that would be zeroed before and rounded after.
        EXPECT_TRUE(CallsOf(program, ComputeCall::Op::kConvert).empty()) << what;
        for (const BufferSpec& buffer : program.buffers) {
          EXPECT_TRUE(buffer.name != "out_acc" && buffer.name != "dq_acc") << what;
        }
      }
    }
  }
}

// The first level initialises the partial or the sums; the last level writes the results.
TEST(DilatedScheduleTest, LevelsFollowOneAnother) {
  const auto flags = [](const AttentionSpec& spec, Direction direction) {
    const ShardPlan plan = MakeShardPlan(spec, Layout::kContiguous, 2);
    const Schedule schedule =
        MakeSchedule(spec, plan, RecipeOn(plan, ScheduleKind::kRing, direction));
    const auto op = direction == Direction::kBackward ? ComputeCall::Op::kScatterAdd
                                                      : ComputeCall::Op::kScatterMerge;
    std::string text;
    for (const ComputeCall& call : CallsOf(schedule.programs[0], op)) {
      text += call.initial ? "i" : "";
      text += call.final ? "f" : "";
      text += ".";
    }
    return text;
  };
  // A part with all tokens and heads writes where the other parts' results are merged.
  const AttentionSpec longnet = SpecOf(512, 4, {{64, 1}, {256, 2}, {512, 4}});
  EXPECT_EQ(flags(longnet, Direction::kForward), ".f.");
  EXPECT_EQ(flags(longnet, Direction::kBackward), "...f.f.f.");
  const AttentionSpec thin = SpecOf(512, 4, {{64, 3}, {256, 2}, {512, 4}});
  EXPECT_EQ(flags(thin, Direction::kForward), "i..f.");
  EXPECT_EQ(flags(thin, Direction::kBackward), "i.i.i....f.f.f.");
  const AttentionSpec last = SpecOf(512, 4, {{256, 2}, {64, 1}});
  EXPECT_EQ(flags(last, Direction::kForward), "i.f.");
  const AttentionSpec alone = SpecOf(512, 4, {{64, 1}});
  EXPECT_EQ(flags(alone, Direction::kForward) + flags(alone, Direction::kBackward), "");
}

TEST(DilatedScheduleTest, AScatterSaysWhichPartsItTakes) {
  const AttentionSpec spec = SpecOf(64, 8, {{16, 8}, {64, 4}});
  const ShardPlan plan = MakeShardPlan(spec, Layout::kContiguous, 1);
  const auto text = [&](Direction direction) {
    return ToString(MakeSchedule(spec, plan, RecipeOn(plan, ScheduleKind::kSingle, direction)),
                    spec);
  };
  const auto has = [](const std::string& text, const std::string& call) {
    return text.find(call) != std::string::npos;
  };
  const std::string forward = text(Direction::kForward);
  EXPECT_TRUE(has(forward, "gather part 7 ")) << forward;
  EXPECT_TRUE(has(forward, "scatter_merge parts[0,8) initial\n")) << forward;
  EXPECT_TRUE(has(forward, "scatter_merge parts[8,12) final\n")) << forward;
  const std::string backward = text(Direction::kBackward);
  EXPECT_TRUE(has(backward, "scatter_add parts[0,8) dq_acc initial;")) << backward;
  EXPECT_TRUE(has(backward, "scatter_add parts[8,12) dq final;")) << backward;
}

// Each part is checked like the program of a separate request.
TEST(DilatedScheduleTest, PartsAreRightSchedules) {
  for (Layout layout : {Layout::kContiguous, Layout::kZigzag, Layout::kStriped}) {
    for (ScheduleKind kind : {ScheduleKind::kRing, ScheduleKind::kAllGather, ScheduleKind::kPassQ,
                              ScheduleKind::kReplicatedQ}) {
      AttentionSpec spec = SpecOf(300, 4, {{60, 3}, {150, 2}, {7, 5}});
      spec.options.causal = true;
      const ShardPlan plan = MakeShardPlan(spec, layout, 3);
      for (const DilatedPart& part : DilatedPartsOf(spec, plan)) {
        for (Direction direction : {Direction::kForward, Direction::kBackward}) {
          const Schedule schedule =
              MakeSchedule(part.spec, part.plan, RecipeOn(part.plan, kind, direction));
          EXPECT_EQ(ScheduleSimulator(part.spec, part.plan, schedule).Run(), "")
              << ScheduleKindName(kind) << " " << LayoutName(layout);
        }
      }
    }
  }
}

TEST(DilatedScheduleTest, EveryRankHasTheSameSteps) {
  // Fewer tokens than ranks, segments whose offset most ranks lack, and no tokens.
  for (const int64_t tokens : {0, 1, 5, 61}) {
    for (ScheduleKind kind :
         {ScheduleKind::kRing, ScheduleKind::kAllGather, ScheduleKind::kPassQ}) {
      AttentionSpec spec = SpecOf(tokens, 3, {{4, 3}, {61, 7}});
      spec.options.sinks = true;
      const ShardPlan plan = MakeShardPlan(spec, Layout::kZigzag, 4);
      const Schedule schedule =
          MakeSchedule(spec, plan, RecipeOn(plan, kind, Direction::kBackward, true));
      for (const Program& program : schedule.programs) {
        EXPECT_EQ(program.steps.size(), schedule.programs[0].steps.size()) << tokens;
      }
    }
  }
}

}  // namespace
}  // namespace ringattn
