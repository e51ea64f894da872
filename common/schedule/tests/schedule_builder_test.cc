// Tests programs built one at a time: they equal those of the whole schedule, and each costs its
// share.
#include <algorithm>
#include <random>
#include <vector>

#include "common/schedule/schedule.h"
#include "common/schedule/testing/schedule_cases.h"
#include "common/schedule/testing/schedule_simulator.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

template <typename Operand>
bool SameRows(const Operand& a, const Operand& b) {
  return a.source_rank == b.source_rank && a.row_begin == b.row_begin && a.row_end == b.row_end;
}

std::vector<ByteRange> RangesOf(const ComputeCall& call) {
  std::vector<ByteRange> ranges;
  ForEachRange(call, [&ranges](const ByteRange& range) { ranges.push_back(range); });
  return ranges;
}

bool SameCall(const ComputeCall& a, const ComputeCall& b) {
  return a.op == b.op && SameRows(a.q, b.q) &&
         std::equal(a.kv.begin(), a.kv.end(), b.kv.begin(), b.kv.end(), SameRows<KvOperand>) &&
         a.parts.size() == b.parts.size() && RangesOf(a) == RangesOf(b) && a.initial == b.initial &&
         a.final == b.final && a.heads == b.heads && a.copy == b.copy &&
         a.store_hint == b.store_hint && a.tiles == b.tiles && a.pairs == b.pairs;
}

void ExpectSame(const Program& a, const Program& b) {
  EXPECT_EQ(a.rank, b.rank);
  ASSERT_EQ(a.buffers.size(), b.buffers.size());
  for (size_t i = 0; i < a.buffers.size(); ++i) {
    EXPECT_EQ(a.buffers[i].name, b.buffers[i].name);
    EXPECT_EQ(a.buffers[i].bytes, b.buffers[i].bytes) << a.buffers[i].name;
    EXPECT_EQ(a.buffers[i].source, b.buffers[i].source) << a.buffers[i].name;
    EXPECT_EQ(a.buffers[i].input, b.buffers[i].input);
    EXPECT_EQ(a.buffers[i].output, b.buffers[i].output);
  }
  ASSERT_EQ(a.steps.size(), b.steps.size());
  for (size_t s = 0; s < a.steps.size(); ++s) {
    ASSERT_EQ(a.steps[s].transfers.size(), b.steps[s].transfers.size()) << "step " << s;
    for (size_t i = 0; i < a.steps[s].transfers.size(); ++i) {
      const Transfer &x = a.steps[s].transfers[i], &y = b.steps[s].transfers[i];
      EXPECT_TRUE(x.kind == y.kind && x.peer == y.peer && x.range == y.range) << "step " << s;
    }
    ASSERT_EQ(a.steps[s].calls.size(), b.steps[s].calls.size()) << "step " << s;
    for (size_t i = 0; i < a.steps[s].calls.size(); ++i) {
      EXPECT_TRUE(SameCall(a.steps[s].calls[i], b.steps[s].calls[i]))
          << "step " << s << " call " << i;
    }
  }
}

// A worker that builds only its own program gets the program that the planner used.
TEST(ScheduleBuilderTest, ARanksProgramIsTheSameByItself) {
  for (int i = 0; i < 300; ++i) {
    std::mt19937 random(900000 + i);
    const ScheduleCase c = DrawScheduleCase(random, 400);
    const Schedule schedule = c.Make();
    for (int rank = 0; rank < c.plan.world_size; ++rank) {
      ExpectSame(c.MakeProgram(rank), schedule.programs[rank]);
    }
    ASSERT_FALSE(HasFailure()) << "case " << i << "\n" << Describe(c, schedule);
  }
}

// Returns whether a program writes to one of its inputs.
bool WritesToInput(const Program& program) {
  const auto is_input = [&](const ByteRange& range) {
    return range.buffer != kNoBuffer && program.buffers[range.buffer].input.has_value();
  };
  for (const Step& step : program.steps) {
    for (const Transfer& transfer : step.transfers) {
      if (transfer.kind == Transfer::Kind::kReceive && is_input(transfer.range)) return true;
    }
    for (const ComputeCall& call : step.calls) {
      if (is_input(call.target)) return true;
    }
  }
  return false;
}

// A forward pass can leave its inputs unchanged for a later backward. Its program is valid, has the
// same calls, and its shard buffers are no larger than the backward program's.
TEST(ScheduleBuilderTest, AForwardPassCanKeepItsInputs) {
  int other_programs = 0;
  for (int i = 0; i < 300; ++i) {
    std::mt19937 random(920000 + i);
    ScheduleCase c = DrawScheduleCase(random, 400);
    if (c.recipe.direction == Direction::kBackward) continue;
    const Schedule plain = c.Make();
    Schedule keeping = plain;
    for (int rank = 0; rank < c.plan.world_size; ++rank) {
      Program& program = keeping.programs[rank];
      program = c.MakeProgram(rank, /*keeps_inputs=*/true);
      EXPECT_FALSE(WritesToInput(program));
      other_programs += WritesToInput(plain.programs[rank]);
      EXPECT_EQ(program.TileCount(), plain.programs[rank].TileCount());
      EXPECT_EQ(program.SentBytes(), plain.programs[rank].SentBytes());
      ScheduleCase reader = c;
      reader.recipe.direction = Direction::kBackward;
      const Program backward = reader.MakeProgram(rank);
      EXPECT_FALSE(WritesToInput(backward));
      for (const BufferSpec& read : backward.buffers) {
        for (const BufferSpec& kept : program.buffers) {
          const bool is_kept = kept.input == read.input || kept.output == read.input;
          if (read.input.has_value() && is_kept) {
            EXPECT_EQ(kept.bytes, read.bytes) << read.name;
          }
        }
      }
    }
    EXPECT_EQ(ScheduleSimulator(c.spec, c.plan, keeping).Run(), "");
    ASSERT_FALSE(HasFailure()) << "case " << i << "\n" << Describe(c, keeping);
  }
  EXPECT_GT(other_programs, 10);
}

// A ring of one computes the same as a single device.
TEST(ScheduleBuilderTest, ARingOfOneComputesAsASingleDevice) {
  int tried = 0;
  for (int i = 0; i < 2000; ++i) {
    std::mt19937 random(910000 + i);
    const ScheduleCase c = DrawScheduleCase(random, 300);
    if (c.plan.world_size != 1) continue;
    ++tried;
    const auto program = [&](ScheduleKind kind) {
      ProgramRecipe recipe = c.recipe;
      recipe.schedule = kind;
      recipe.heads_per_step = 0;
      recipe.group_size = 0;
      return MakeProgram(c.spec, c.plan, recipe, 0);
    };
    ExpectSame(program(ScheduleKind::kSingle), program(ScheduleKind::kRing));
    ASSERT_FALSE(HasFailure()) << "case " << i;
  }
  EXPECT_GT(tried, 100);
}

// Counts passes over two ranks' pieces by the polls that precede each: all programs take world_size
// times the passes of one, in addition to the shared ones.
TEST(ScheduleBuilderTest, OneProgramCostsItsShareOfAll) {
  AttentionSpec spec = DenseSpec(1 << 16, 1 << 16);
  const ShardPlan plan = MakeShardPlan(spec, Layout::kStriped, 16);
  int passes = 0;
  ScheduleBuilder builder(spec, plan, RecipeOn(plan, ScheduleKind::kRing, Direction::kForward),
                          [&] {
                            ++passes;
                            return false;
                          });
  passes = 0;
  for (int rank = 0; rank < 16; ++rank) (void)builder.MakeProgram(rank);
  EXPECT_EQ(passes, 16 * 16);
  passes = 0;
  (void)builder.MakeProgram(7);
  EXPECT_EQ(passes, 16);
}

}  // namespace
}  // namespace ringattn
