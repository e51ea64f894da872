// Tests of what a double ring exchanges. drawn_schedules_test.cc has drawn cases.
#include <string>
#include <vector>

#include "common/schedule/schedule.h"
#include "common/schedule/testing/schedule_cases.h"
#include "common/schedule/testing/schedule_simulator.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

struct Ring {
  int hosts = 2;
  int per_host = 2;

  int world_size() const { return hosts * per_host; }
  std::vector<int> host_of_rank() const {
    std::vector<int> hosts_by_rank;
    for (int rank = 0; rank < world_size(); ++rank) hosts_by_rank.push_back(rank / per_host);
    return hosts_by_rank;
  }
};

Schedule Make(const AttentionSpec& spec, const Ring& ring, ScheduleKind kind, Direction direction) {
  const ShardPlan plan = MakeShardPlan(spec, Layout::kContiguous, ring.world_size());
  ProgramRecipe recipe = RecipeOn(plan, kind, direction);
  if (kind == ScheduleKind::kDoubleRing) recipe.group_size = ring.per_host;
  Schedule schedule = MakeSchedule(spec, plan, recipe);
  for (Program& program : schedule.programs) AssignLanes(ring.host_of_rank(), program);
  EXPECT_EQ(ScheduleSimulator(spec, plan, schedule).Run(), "");
  return schedule;
}

int64_t BetweenHosts(const Schedule& schedule, const Ring& ring, int host) {
  int64_t bytes = 0;
  for (int slot = 0; slot < ring.per_host; ++slot) {
    bytes += schedule.programs[host * ring.per_host + slot].SentBytes(Lane::kBetween);
  }
  return bytes;
}

// A host sends (W - G) / (W - 1) of a flat ring's bytes to other hosts, to the byte, and all of its
// ranks send equally many.
TEST(DoubleRingTest, BytesBetweenHosts) {
  for (const Ring& ring : {Ring{2, 2}, Ring{2, 4}, Ring{3, 2}, Ring{4, 3}, Ring{2, 8}}) {
    const AttentionSpec spec = DenseSpec(32 * ring.world_size(), 32 * ring.world_size());
    for (Direction direction : {Direction::kForward, Direction::kBackward}) {
      const Schedule flat = Make(spec, ring, ScheduleKind::kRing, direction);
      const Schedule twofold = Make(spec, ring, ScheduleKind::kDoubleRing, direction);
      for (int host = 0; host < ring.hosts; ++host) {
        EXPECT_EQ(BetweenHosts(twofold, ring, host) * (ring.world_size() - 1),
                  BetweenHosts(flat, ring, host) * (ring.world_size() - ring.per_host));
        for (int slot = 0; slot < ring.per_host; ++slot) {
          const Program& program = twofold.programs[host * ring.per_host + slot];
          EXPECT_EQ(program.SentBytes(Lane::kBetween) * ring.per_host,
                    BetweenHosts(twofold, ring, host));
        }
      }
    }
  }
}

// Ranks of other hosts with another slot never exchange.
TEST(DoubleRingTest, OnlyEqualSlotsExchangeBetweenHosts) {
  const Ring ring{3, 4};
  const AttentionSpec spec = DenseSpec(480, 480);
  for (Direction direction : {Direction::kForward, Direction::kBackward}) {
    for (const Program& program : Make(spec, ring, ScheduleKind::kDoubleRing, direction).programs) {
      for (const Step& step : program.steps) {
        for (const Transfer& transfer : step.transfers) {
          if (transfer.lane == Lane::kInside) continue;
          EXPECT_EQ(transfer.peer % ring.per_host, program.rank % ring.per_host);
        }
      }
    }
  }
}

// In a forward pass every outer hop may take all steps of a round.
TEST(DoubleRingTest, OuterHopsMayTakeARound) {
  for (const Ring& ring : {Ring{2, 2}, Ring{3, 4}}) {
    const AttentionSpec spec = DenseSpec(32 * ring.world_size(), 32 * ring.world_size());
    const Schedule schedule = Make(spec, ring, ScheduleKind::kDoubleRing, Direction::kForward);
    EXPECT_EQ(schedule.programs[0].steps.size(), ring.world_size());
    for (const Program& program : schedule.programs) {
      for (const Step& step : program.steps) {
        for (const Transfer& transfer : step.transfers) {
          EXPECT_EQ(transfer.steps, transfer.lane == Lane::kBetween ? ring.per_host : 1);
        }
      }
    }
  }
}

// With one group, and with groups of one rank, the double ring has the flat ring's transfers.
TEST(DoubleRingTest, OneGroupIsTheFlatRing) {
  const AttentionSpec spec = DenseSpec(256, 256);
  const Ring ring{1, 4};
  for (Direction direction : {Direction::kForward, Direction::kBackward}) {
    const auto text = [&](ScheduleKind kind) {
      const std::string all = ToString(Make(spec, ring, kind, direction), spec);
      return all.substr(all.find(", exchange"));  // after the schedule's name
    };
    EXPECT_EQ(text(ScheduleKind::kDoubleRing), text(ScheduleKind::kRing));
  }
}

// With a window shorter than a shard, ranks exchange directly and ignore the groups.
TEST(DoubleRingTest, ShortWindowsAreDirect) {
  AttentionSpec spec = DenseSpec(512, 512);
  spec.options.causal = true;
  spec.options.window_left = 16;
  const Ring ring{2, 4};
  const Schedule flat = Make(spec, ring, ScheduleKind::kRing, Direction::kForward);
  const Schedule twofold = Make(spec, ring, ScheduleKind::kDoubleRing, Direction::kForward);
  EXPECT_EQ(twofold.programs[3].SentBytes(), flat.programs[3].SentBytes());
}

}  // namespace
}  // namespace ringattn
