#include "common/schedule/schedule.h"

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <string>
#include <vector>

#include "common/schedule/testing/schedule_cases.h"
#include "common/schedule/testing/schedule_simulator.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

TEST(ScheduleTest, SingleDeviceForwardNeedsNoAccumulator) {
  const AttentionSpec spec = DenseSpec(100, 100);
  const ShardPlan plan = MakeShardPlan(spec, Layout::kContiguous, 1);
  const Schedule schedule =
      MakeSchedule(spec, plan, RecipeOn(plan, ScheduleKind::kSingle, Direction::kForward));
  ASSERT_EQ(schedule.programs.size(), 1u);
  EXPECT_EQ(schedule.programs[0].buffers.size(), 5u);  // q, k, v, out, lse
  ASSERT_EQ(schedule.programs[0].steps.size(), 1u);
  const ComputeCall& call = schedule.programs[0].steps[0].calls.at(0);
  EXPECT_TRUE(call.initial && call.final);
  EXPECT_EQ(call.pairs, 10000);
}

TEST(ScheduleTest, RowsWithoutKeysAreStillWritten) {
  AttentionSpec spec = DenseSpec(64, 8);
  spec.options.causal = true;  // bottom right: the first 56 rows see no key
  const ShardPlan plan = MakeShardPlan(spec, Layout::kContiguous, 4);
  const Schedule schedule =
      MakeSchedule(spec, plan, RecipeOn(plan, ScheduleKind::kRing, Direction::kForward));
  const ComputeCall& call = schedule.programs[0].steps.at(0).calls.at(0);
  EXPECT_TRUE(call.kv.empty());
  EXPECT_TRUE(call.initial && call.final);
}

TEST(ScheduleTest, CausalZigzagHalvesTheWorkAndBalancesIt) {
  AttentionSpec spec = DenseSpec(65536, 65536);
  const int64_t full = (65536 / 128) * (65536 / 128);
  spec.options.causal = true;
  for (int world_size : {2, 4, 8}) {
    const ShardPlan plan = MakeShardPlan(spec, Layout::kZigzag, world_size);
    for (Direction direction : {Direction::kForward, Direction::kBackward}) {
      const Schedule schedule =
          MakeSchedule(spec, plan, RecipeOn(plan, ScheduleKind::kRing, direction));
      int64_t total = 0, least = full, most = 0;
      for (const Program& program : schedule.programs) {
        total += program.TileCount();
        least = std::min(least, program.TileCount());
        most = std::max(most, program.TileCount());
      }
      EXPECT_LE(total, 0.53 * full);
      EXPECT_LE(most, 1.05 * least);
      EXPECT_FALSE(schedule.direct);
    }
  }
}

TEST(ScheduleTest, RelayTalksToNeighboursOnly) {
  AttentionSpec spec = DenseSpec(4096, 4096);
  const ShardPlan plan = MakeShardPlan(spec, Layout::kContiguous, 4);
  const Schedule schedule =
      MakeSchedule(spec, plan, RecipeOn(plan, ScheduleKind::kRing, Direction::kForward));
  for (const Program& program : schedule.programs) {
    ASSERT_EQ(program.steps.size(), 4u);
    for (const Step& step : program.steps) {
      for (const Transfer& transfer : step.transfers) {
        const int towards = transfer.kind == Transfer::Kind::kSend ? 1 : 3;
        EXPECT_EQ(transfer.peer, (program.rank + towards) % 4);
      }
    }
  }
}

// A window of 1,024 tokens out of 64K, over 4 ranks.
TEST(ScheduleTest, AWindowExchangesWhatItReaches) {
  for (bool causal : {true, false}) {
    AttentionSpec spec = DenseSpec(65536, 65536);
    spec.options.causal = causal;
    spec.options.window_left = 1024;
    spec.options.window_right = causal ? 0 : 1024;
    const ShardPlan plan = MakeShardPlan(spec, Layout::kContiguous, 4);
    const Schedule schedule =
        MakeSchedule(spec, plan, RecipeOn(plan, ScheduleKind::kRing, Direction::kForward));
    ScheduleSimulator simulator(spec, plan, schedule);
    ASSERT_EQ(simulator.Run(), "");
    const int64_t row_bytes = 2 + 2;  // key and value: one bf16 head of one element each
    for (int from = 0; from < 4; ++from) {
      for (int to = 0; to < 4; ++to) {
        const bool expected = to == from + 1 || (!causal && to == from - 1);
        EXPECT_EQ(simulator.bytes_sent()[from][to], expected ? 1024 * row_bytes : 0)
            << from << " to " << to;
      }
    }
    EXPECT_EQ(schedule.direct, !causal);
  }
}

// One call over all keys, after one exchange; a backward has one more exchange and additions in
// rank order.
TEST(ScheduleTest, AllGatherComputesOnceOnAllKeys) {
  AttentionSpec spec = DenseSpec(4096, 4096);
  spec.options.causal = true;
  const ShardPlan plan = MakeShardPlan(spec, Layout::kZigzag, 8);
  const Schedule forward =
      MakeSchedule(spec, plan, RecipeOn(plan, ScheduleKind::kAllGather, Direction::kForward));
  for (const Program& program : forward.programs) {
    ASSERT_EQ(program.steps.size(), 2u);
    EXPECT_TRUE(program.steps[0].calls.empty() && program.steps[1].transfers.empty());
    ASSERT_EQ(program.steps[1].calls.size(), 1u);
    EXPECT_TRUE(program.steps[1].calls[0].initial && program.steps[1].calls[0].final);
    for (const BufferSpec& buffer : program.buffers) EXPECT_NE(buffer.name, "out_acc");
  }
  const Schedule backward =
      MakeSchedule(spec, plan, RecipeOn(plan, ScheduleKind::kAllGather, Direction::kBackward));
  for (const Program& program : backward.programs) {
    ASSERT_EQ(program.steps.size(), 3u);
    EXPECT_TRUE(program.steps[1].transfers.empty());
    std::vector<int64_t> landed;
    for (const ComputeCall& call : program.steps[2].calls) {
      if (call.op == ComputeCall::Op::kAdd &&
          program.buffers[call.source.buffer].name == "landing.dk") {
        landed.push_back(call.source.offset);
      }
    }
    EXPECT_FALSE(landed.empty());
    EXPECT_TRUE(std::is_sorted(landed.begin(), landed.end()));
  }
  // The same work as on the ring, and only rows that their target sees travel.
  const Schedule ring =
      MakeSchedule(spec, plan, RecipeOn(plan, ScheduleKind::kRing, Direction::kForward));
  for (int rank = 0; rank < 8; ++rank) {
    EXPECT_EQ(forward.programs[rank].PairCount(), ring.programs[rank].PairCount());
    EXPECT_LE(forward.programs[rank].SentBytes(), 7 * 512 * 4);
  }
}

TEST(ScheduleTest, AllGatherFetchesWhatAWindowReaches) {
  AttentionSpec spec = DenseSpec(65536, 65536);
  spec.options.causal = true;
  spec.options.window_left = 1024;
  const ShardPlan plan = MakeShardPlan(spec, Layout::kContiguous, 4);
  const Schedule schedule =
      MakeSchedule(spec, plan, RecipeOn(plan, ScheduleKind::kAllGather, Direction::kForward));
  ScheduleSimulator simulator(spec, plan, schedule);
  ASSERT_EQ(simulator.Run(), "");
  for (int from = 0; from < 4; ++from) {
    for (int to = 0; to < 4; ++to) {
      EXPECT_EQ(simulator.bytes_sent()[from][to], to == from + 1 ? 1024 * 4 : 0);
    }
  }
}

// Queries travel, K/V do not: per rank W - 1 hops of q and as many partials that return to their
// owners.
TEST(ScheduleTest, PassQSendsQueriesAndPartials) {
  AttentionSpec spec = DenseSpec(512, 8192);
  spec.shape.num_heads = 4;
  spec.shape.num_kv_heads = 2;
  const ShardPlan plan = MakeShardPlan(spec, Layout::kContiguous, 4);
  const int64_t rows = 512 / 4;
  const int64_t q = rows * 4 * 2, part = rows * 4 * 4, statistic = rows * 4 * 4;
  const Schedule forward =
      MakeSchedule(spec, plan, RecipeOn(plan, ScheduleKind::kPassQ, Direction::kForward));
  EXPECT_FALSE(forward.direct);
  for (const Program& program : forward.programs) {
    EXPECT_EQ(program.SentBytes(), 3 * (q + part + statistic));
    // The partial that is sent in a step was computed in the step before, so nothing waits for it.
    ASSERT_EQ(program.steps.size(), 5u);
    for (size_t step = 0; step < 4; ++step) {
      const ComputeCall& call = program.steps[step].calls.at(0);
      EXPECT_TRUE(call.op == ComputeCall::Op::kForward && call.initial && !call.final);
      for (const Transfer& transfer : program.steps[step].transfers) {
        EXPECT_NE(transfer.range.buffer, call.q.out_acc.buffer);
        EXPECT_NE(transfer.range.buffer, call.q.lse.buffer);
      }
    }
    EXPECT_TRUE(program.steps.back().calls.back().final);
  }
  const Schedule backward =
      MakeSchedule(spec, plan, RecipeOn(plan, ScheduleKind::kPassQ, Direction::kBackward));
  for (const Program& program : backward.programs) {
    EXPECT_EQ(program.SentBytes(), 3 * (2 * q + 2 * statistic + part));
  }
}

// Merges all partials in rank order, whichever arrived first.
TEST(ScheduleTest, ReplicatedQMergesInTheOrderOfRanks) {
  AttentionSpec spec = DenseSpec(4096, 4096);
  spec.options.causal = true;
  const ShardPlan plan = MakeShardPlan(spec, Layout::kZigzag, 8);
  const Schedule schedule =
      MakeSchedule(spec, plan, RecipeOn(plan, ScheduleKind::kReplicatedQ, Direction::kForward));
  int64_t least = int64_t{1} << 60, most = 0;
  for (const Program& program : schedule.programs) {
    least = std::min(least, program.TileCount());
    most = std::max(most, program.TileCount());
    const ComputeCall& merge = program.steps.back().calls.back();
    ASSERT_EQ(merge.op, ComputeCall::Op::kMerge);
    ASSERT_EQ(merge.parts.size(), 8u);
    // The partial of the rank s steps to the left arrives at step s + 1, in slot s - 1.
    for (int from = 0; from < 8; ++from) {
      const std::string& name = program.buffers[merge.parts[from].lse.buffer].name;
      const int step = (from - program.rank + 8) % 8;
      EXPECT_EQ(name, step == 0 ? "lse" : "part" + std::to_string(step - 1) + ".lse");
    }
  }
  // K/V use zigzag, so all ranks have work when only late queries see late keys.
  EXPECT_LE(most, 1.1 * least);
}

// With a window of a few shards, only ranks that see keys receive queries, directly from their
// owner.
TEST(ScheduleTest, PassQSkipsRanksWithoutWork) {
  AttentionSpec spec = DenseSpec(8192, 8192);
  spec.options.window_left = spec.options.window_right = 512;
  const ShardPlan plan = MakeShardPlan(spec, Layout::kContiguous, 8);
  const Schedule schedule =
      MakeSchedule(spec, plan, RecipeOn(plan, ScheduleKind::kPassQ, Direction::kForward));
  EXPECT_TRUE(schedule.direct);
  ScheduleSimulator simulator(spec, plan, schedule);
  ASSERT_EQ(simulator.Run(), "");
  for (int from = 0; from < 8; ++from) {
    for (int to = 0; to < 8; ++to) {
      EXPECT_EQ(simulator.bytes_sent()[from][to] != 0, std::abs(from - to) == 1);
    }
  }
}

TEST(ScheduleTest, GradientsTravelWhileTheNextPartComputes) {
  const AttentionSpec spec = DenseSpec(8192, 8192);
  const ShardPlan plan = MakeShardPlan(spec, Layout::kContiguous, 4);
  const Schedule schedule =
      MakeSchedule(spec, plan, RecipeOn(plan, ScheduleKind::kRing, Direction::kBackward));
  for (const Program& program : schedule.programs) {
    const ComputeCall* last = nullptr;
    for (const Step& step : program.steps) {
      for (const ComputeCall& call : step.calls) {
        if (call.op == ComputeCall::Op::kBackward) last = &call;
      }
    }
    ASSERT_NE(last, nullptr);
    EXPECT_EQ(last->kv[0].source_rank, program.rank);
    EXPECT_LE(4 * last->kv[0].rows(), RowsIn(plan.kv[program.rank]));
    for (const Step& step : program.steps) {
      for (const ComputeCall& call : step.calls) {
        if (call.op != ComputeCall::Op::kBackward || &call == last) continue;
        for (const Transfer& transfer : step.transfers) {
          // No call of a ring step waits for its own step's exchange, so both run concurrently. The
          // exception is the last step: own rows whose gradients from other ranks arrive in the
          // meantime.
          for (const ByteRange& range : {call.kv[0].dk, call.kv[0].dv}) {
            EXPECT_FALSE(transfer.range.buffer == range.buffer &&
                         transfer.range.offset < range.offset + range.bytes &&
                         range.offset < transfer.range.offset + transfer.range.bytes)
                << "rank " << program.rank;
          }
        }
      }
    }
  }
}

// Only the rows within a window's reach return, several steps before the last, where most parts are
// empty. The rest of the block need not wait for them.
TEST(ScheduleTest, AWindowsOwnRowsDoNotWaitForThoseThatComeHome) {
  AttentionSpec spec = DenseSpec(8192, 8192);
  spec.options.causal = true;
  spec.options.window_left = 512;
  const ShardPlan plan = MakeShardPlan(spec, Layout::kContiguous, 4);
  const Schedule schedule =
      MakeSchedule(spec, plan, RecipeOn(plan, ScheduleKind::kRing, Direction::kBackward));
  for (const Program& program : schedule.programs) {
    std::vector<const ComputeCall*> own;
    for (const Step& step : program.steps) {
      for (const ComputeCall& call : step.calls) {
        if (call.op == ComputeCall::Op::kBackward && call.kv[0].source_rank == program.rank) {
          own.push_back(&call);
        }
      }
    }
    if (program.rank == 3) {  // no other rank sees its keys
      ASSERT_EQ(own.size(), 1u);
      continue;
    }
    ASSERT_EQ(own.size(), 2u) << "rank " << program.rank;
    EXPECT_EQ(own[0]->kv[0].row_end, 2048 - 512);
    EXPECT_EQ(own[1]->kv[0].row_begin, 2048 - 512);
  }
}

// Consecutive backward calls may overlap on a device, which calls between them prevent. Gradients
// of keys that rank 0 sees first start from zero there. In all but the first step their memory is
// in use until the step begins.
TEST(ScheduleTest, FewZerosBetweenBackwardCallsOfARing) {
  AttentionSpec spec = DenseSpec(8192, 8192);
  spec.options.causal = true;
  const ShardPlan plan = MakeShardPlan(spec, Layout::kZigzag, 4);
  const Schedule schedule =
      MakeSchedule(spec, plan, RecipeOn(plan, ScheduleKind::kRing, Direction::kBackward));
  for (const Program& program : schedule.programs) {
    std::vector<ComputeCall::Op> calls;
    for (const Step& step : program.steps) {
      for (const ComputeCall& call : step.calls) calls.push_back(call.op);
    }
    const auto first =
        std::find(calls.begin(), calls.end(), ComputeCall::Op::kBackward) - calls.begin();
    int zeros = 0, groups = 0;
    for (size_t i = first; i < calls.size(); ++i) {
      if (calls[i] != ComputeCall::Op::kZero) continue;
      ++zeros;
      groups += calls[i - 1] == ComputeCall::Op::kBackward ? 1 : 0;
    }
    EXPECT_EQ(groups, program.rank == 0 ? 2 : 0) << "rank " << program.rank;
    EXPECT_EQ(zeros, 2 * groups) << "dk and dv, rank " << program.rank;
  }
}

TEST(ScheduleTest, OutputsOfFp32AreTheirAccumulators) {
  AttentionSpec spec = DenseSpec(300, 300);
  spec.dtype = DType::kFloat32;
  const ShardPlan plan = MakeShardPlan(spec, Layout::kContiguous, 3);
  const Schedule schedule =
      MakeSchedule(spec, plan, RecipeOn(plan, ScheduleKind::kRing, Direction::kBackward));
  for (const Program& program : schedule.programs) {
    for (const Step& step : program.steps) {
      for (const ComputeCall& call : step.calls) {
        EXPECT_NE(call.op, ComputeCall::Op::kConvert);
        if (call.op != ComputeCall::Op::kBackward) continue;
        EXPECT_EQ(program.buffers[call.q.dq_acc.buffer].output, TensorId::kDq);
      }
    }
  }
}

TEST(ScheduleTest, IsFastAtAMillionTokens) {
  AttentionSpec spec = DenseSpec(1 << 20, 1 << 20);
  spec.options.causal = true;
  for (Layout layout :
       {Layout::kContiguous, Layout::kZigzag, Layout::kStriped, Layout::kZigzagPerDocument}) {
    const ShardPlan plan = MakeShardPlan(spec, layout, 8);
    const std::clock_t begin = std::clock();  // processor time: other processes share the machine
    const Schedule schedule =
        MakeSchedule(spec, plan, RecipeOn(plan, ScheduleKind::kRing, Direction::kBackward, true));
    const double seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
    EXPECT_LT(seconds, 0.1);
    int64_t pairs = 0;
    for (const Program& program : schedule.programs) pairs += program.PairCount();
    EXPECT_EQ(pairs, 2 * ((int64_t{1} << 20) * ((int64_t{1} << 20) + 1) / 2));
  }
}

TEST(ScheduleTest, Prints) {
  AttentionSpec spec = DenseSpec(4096, 4096);
  spec.options.causal = true;
  const ShardPlan plan = MakeShardPlan(spec, Layout::kZigzag, 2);
  const std::string text = ToString(
      MakeSchedule(spec, plan, RecipeOn(plan, ScheduleKind::kRing, Direction::kForward)), spec);
  for (const char* part : {"schedule ring, forward, exchange relay", "rank 1", "kv_slot1.k",
                           "to 1: 4096 B", "tiles", "initial", "final", "exchanged"}) {
    EXPECT_TRUE(absl::StrContains(text, part)) << part << "\n" << text;
  }
}

}  // namespace
}  // namespace ringattn
