// Tests of drawn schedules: the symbolic simulator runs them, and their memory has bounds.
#include <algorithm>
#include <initializer_list>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "common/schedule/schedule.h"
#include "common/schedule/testing/schedule_cases.h"
#include "common/schedule/testing/schedule_simulator.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

// Returns the rows of the largest shard, per batch row.
int64_t LargestShard(const ShardPlan& plan) {
  int64_t rows = 0;
  for (const Shard& shard : plan.kv) rows = std::max(rows, RowsIn(shard));
  return rows;
}

// K/V: two blocks, or three if the own block outlives the pass. Gradients: the own block, two that
// travel, and, if several ranks send to the same rows, two landing slots.
void ExpectMemoryIsBounded(const ScheduleCase& c, const Schedule& schedule) {
  const AttentionShape& shape = c.spec.shape;
  const int64_t largest = shape.batch * LargestShard(c.plan);
  const int64_t block = largest * shape.num_kv_heads * (shape.head_dim + shape.head_dim_v);
  const int64_t ids = c.spec.options.segment_ids ? largest * 4 : 0;
  const int64_t blocks = schedule.direct || c.recipe.direction == Direction::kBackward ? 3 : 2;
  for (const Program& program : schedule.programs) {
    int64_t keys = 0, gradients = 0;
    for (const BufferSpec& buffer : program.buffers) {
      const std::string& name = buffer.name;
      if (name == "k" || name == "v" || absl::StartsWith(name, "kv_slot") ||
          name == "kv_segment_ids") {
        keys += buffer.bytes;
      }
      if (absl::StartsWith(name, "dkv_slot") || absl::StartsWith(name, "landing")) {
        gradients += buffer.bytes;
      }
    }
    EXPECT_LE(keys, blocks * (block * ElementBytes(c.spec.dtype) + ids));
    EXPECT_LE(gradients, (schedule.direct ? 4 : 2) * block * 4);
    if (c.plan.world_size == 1) {
      EXPECT_EQ(gradients, 0);
      EXPECT_EQ(program.SentBytes(), 0);
    }
  }
}

// K/V of all ranks, including the own; backward also others' gradients and, from every other rank,
// as many rows as the own shard has.
void ExpectAllGatherMemory(const ScheduleCase& c, const Schedule& schedule) {
  const AttentionShape& shape = c.spec.shape;
  const int64_t per_row = shape.batch * shape.num_kv_heads * (shape.head_dim + shape.head_dim_v);
  for (const Program& program : schedule.programs) {
    int64_t keys = 0, gathered = 0, landing = 0;
    for (const BufferSpec& buffer : program.buffers) {
      const std::string& name = buffer.name;
      if (name == "k" || name == "v" || name == "gathered.k" || name == "gathered.v") {
        keys += buffer.bytes;
      }
      if (name == "gathered.dk" || name == "gathered.dv") gathered += buffer.bytes;
      if (absl::StartsWith(name, "landing")) landing += buffer.bytes;
    }
    const int64_t own_rows = RowsIn(c.plan.kv[program.rank]);
    EXPECT_LE(keys, shape.seq_len_kv * per_row * ElementBytes(c.spec.dtype));
    EXPECT_LE(gathered, (shape.seq_len_kv - own_rows) * per_row * 4);
    EXPECT_LE(landing, (c.plan.world_size - 1) * own_rows * per_row * 4);
  }
}

int64_t BytesNamed(const Program& program, std::initializer_list<absl::string_view> prefixes) {
  int64_t bytes = 0;
  for (const BufferSpec& buffer : program.buffers) {
    for (absl::string_view prefix : prefixes) {
      bytes += absl::StartsWith(buffer.name, prefix) ? buffer.bytes : 0;
    }
  }
  return bytes;
}

// Two groups: the packed own shard and others' rows. The same for their gradients, and landing
// space for one. The q side and the request's K/V are whole.
void ExpectHeadGroupsMemory(const ScheduleCase& c, const Schedule& schedule) {
  const AttentionShape& shape = c.spec.shape;
  const int64_t per_row =
      shape.batch * c.recipe.heads_per_step * (shape.head_dim + shape.head_dim_v);
  const int64_t element_bytes = ElementBytes(c.spec.dtype);
  for (const Program& program : schedule.programs) {
    const int64_t own_rows = RowsIn(c.plan.kv[program.rank]);
    const int64_t others_rows = shape.seq_len_kv - own_rows;
    EXPECT_LE(BytesNamed(program, {"own0.k", "own0.v", "own1.k", "own1.v"}),
              2 * own_rows * per_row * element_bytes);
    EXPECT_LE(BytesNamed(program, {"gathered0.k", "gathered0.v", "gathered1.k", "gathered1.v"}),
              2 * others_rows * per_row * element_bytes);
    EXPECT_LE(BytesNamed(program, {"gathered0.d", "gathered1.d"}), 2 * others_rows * per_row * 4);
    EXPECT_LE(BytesNamed(program, {"own0.d", "own1.d"}), 2 * own_rows * per_row * 4);
    EXPECT_LE(BytesNamed(program, {"landing"}), (c.plan.world_size - 1) * own_rows * per_row * 4);
  }
}

// K/V and their gradients are the shard's. Others' queries, with the tensors that travel with them:
// two shards, or all. Partials: three, or one per rank.
void ExpectResidentKeysMemory(const ScheduleCase& c, const Schedule& schedule) {
  const AttentionShape& shape = c.spec.shape;
  int64_t largest = 0;
  for (const Shard& shard : c.plan.q) largest = std::max(largest, RowsIn(shard));
  const int64_t heads = shape.batch * shape.num_heads;
  const bool backward = c.recipe.direction == Direction::kBackward;
  int64_t per_row = heads * shape.head_dim * ElementBytes(c.spec.dtype);
  if (backward) per_row += heads * (shape.head_dim_v * ElementBytes(c.spec.dtype) + 8);
  if (c.spec.options.segment_ids) per_row += shape.batch * 4;
  int64_t part = 0;
  if (!backward || c.recipe.recompute_forward) part += heads * (shape.head_dim_v + 1) * 4;
  if (backward) part += heads * shape.head_dim * 4;
  const bool gathered = c.recipe.schedule == ScheduleKind::kReplicatedQ;
  const int ranks = c.plan.world_size;
  for (const Program& program : schedule.programs) {
    const int64_t own = RowsIn(c.plan.q[program.rank]);
    const int64_t others =
        gathered ? shape.seq_len_q - own : std::min<int64_t>(2, ranks - 1) * largest;
    EXPECT_LE(BytesNamed(program, {"others"}), others * per_row);
    EXPECT_LE(BytesNamed(program, {"part"}), (ranks == 1 ? 0
                                              : gathered ? ranks
                                                         : 3) *
                                                 largest * part);
    EXPECT_EQ(BytesNamed(program, {"gathered", "kv_slot", "dkv_slot", "landing"}), 0);
  }
}

// Round by round the owner's block and two that go from group to group, and two that travel in the
// group. The gradients of as many, and a landing slot for each sum that goes home.
void ExpectDoubleRingMemory(const ScheduleCase& c, const Schedule& schedule) {
  const AttentionShape& shape = c.spec.shape;
  const int64_t block =
      shape.batch * LargestShard(c.plan) * shape.num_kv_heads * (shape.head_dim + shape.head_dim_v);
  const int64_t element_bytes = ElementBytes(c.spec.dtype);
  for (const Program& program : schedule.programs) {
    EXPECT_LE(BytesNamed(program, {"kv_slot"}) -
                  BytesNamed(program, {"kv_slot1.kv_segment_ids", "kv_slot2.kv_segment_ids",
                                       "kv_slot3.kv_segment_ids", "kv_slot4.kv_segment_ids"}),
              4 * block * element_bytes);
    EXPECT_LE(BytesNamed(program, {"dkv_slot"}), 7 * block * 4);
    EXPECT_LE(BytesNamed(program, {"landing"}), 2 * block * 4);
  }
}

void ExpectMemory(const ScheduleCase& c, const Schedule& schedule) {
  if (c.recipe.schedule == ScheduleKind::kDoubleRing && !schedule.direct &&
      c.recipe.group_size < c.plan.world_size) {
    return ExpectDoubleRingMemory(c, schedule);
  }
  if (KeepsKeysInPlace(c.recipe.schedule)) return ExpectResidentKeysMemory(c, schedule);
  if (c.recipe.heads_per_step != 0 && c.recipe.heads_per_step != c.spec.shape.num_kv_heads) {
    return ExpectHeadGroupsMemory(c, schedule);
  }
  c.recipe.schedule == ScheduleKind::kAllGather ? ExpectAllGatherMemory(c, schedule)
                                                : ExpectMemoryIsBounded(c, schedule);
}

// Returns the host of each rank. Hosts need not have equally many ranks, nor neighbouring ones.
std::vector<int> DrawHosts(std::mt19937& random, int world_size) {
  std::vector<int> host_of_rank;
  for (int rank = 0; rank < world_size; ++rank) {
    host_of_rank.push_back(static_cast<int>(random() % 3));
  }
  return host_of_rank;
}

// Returns the hosts of a double ring whose groups are hosts.
std::vector<int> HostsOfGroups(const ScheduleCase& c) {
  std::vector<int> host_of_rank;
  for (int rank = 0; rank < c.plan.world_size; ++rank) {
    host_of_rank.push_back(rank / static_cast<int>(c.recipe.group_size));
  }
  return host_of_rank;
}

void AssignLanes(Schedule& schedule, const std::vector<int>& host_of_rank) {
  for (Program& program : schedule.programs) ringattn::AssignLanes(host_of_rank, program);
}

void RunCases(int seed, int count, int64_t longest) {
  std::map<ScheduleKind, int> direct, relayed;
  for (int i = 0; i < count; ++i) {
    std::mt19937 random(seed * 100000 + i);
    const ScheduleCase c = DrawScheduleCase(random, longest);
    Schedule schedule = c.Make();
    const bool has_groups = c.recipe.schedule == ScheduleKind::kDoubleRing;
    if (i % 2 == 1) AssignLanes(schedule, DrawHosts(random, c.plan.world_size));
    if (has_groups && i % 4 != 1) AssignLanes(schedule, HostsOfGroups(c));
    ScheduleSimulator simulator(c.spec, c.plan, schedule);
    const std::string error = simulator.Run();
    ASSERT_EQ(error, "") << "seed " << seed << " case " << i << "\n" << Describe(c, schedule);
    ExpectMemory(c, schedule);
    ASSERT_FALSE(testing::Test::HasFailure()) << "case " << i << "\n" << Describe(c, schedule);
    if (c.recipe.schedule != ScheduleKind::kRing && c.recipe.schedule != ScheduleKind::kPassQ)
      continue;
    ++(schedule.direct ? direct : relayed)[c.recipe.schedule];
  }
  for (ScheduleKind kind : {ScheduleKind::kRing, ScheduleKind::kPassQ}) {
    EXPECT_GT(direct[kind], relayed[kind] / 50) << ScheduleKindName(kind);
    EXPECT_LT(direct[kind], relayed[kind]) << ScheduleKindName(kind);
  }
}

TEST(DrawnSchedulesTest, ManyShortSequences) { RunCases(1, 8000, 40); }

// Long enough that parts of shards travel separately.
TEST(DrawnSchedulesTest, LongerSequences) { RunCases(2, 600, 3000); }

// Checks the simulator itself: if any single call, or all transfers of any step, are removed, it
// must report an error.
TEST(DrawnSchedulesTest, TheSimulatorNoticesDamage) {
  int damaged = 0;
  for (int i = 0; i < 400; ++i) {
    std::mt19937 random(7000 + i);
    const ScheduleCase c = DrawScheduleCase(random, 40);
    const Schedule intact = c.Make();
    for (size_t step = 0; step < intact.programs[0].steps.size(); ++step) {
      Schedule schedule = intact;
      bool any = false;
      for (Program& program : schedule.programs) {
        any = any || !program.steps[step].transfers.empty();
        program.steps[step].transfers.clear();
      }
      // A backward pass may fetch again what the forward pass left in a slot.
      if (any && !c.recipe.recompute_forward) {
        EXPECT_NE(ScheduleSimulator(c.spec, c.plan, schedule).Run(), "")
            << "case " << i << " step " << step;
        ++damaged;
      }
      const int rank = random() % c.plan.world_size;
      std::vector<ComputeCall>& calls = (schedule = intact).programs[rank].steps[step].calls;
      if (calls.empty()) continue;
      const size_t victim = random() % calls.size();
      // Removals without effect: the delta of a rank without a backward call, zeros under sums that
      // head groups overwrite in full, and copies that the forward pass has already made.
      if (calls[victim].op == ComputeCall::Op::kDelta) continue;
      if (c.recipe.heads_per_step != 0 && calls[victim].op == ComputeCall::Op::kZero) continue;
      if (c.recipe.recompute_forward && calls[victim].op == ComputeCall::Op::kCopy) continue;
      calls.erase(calls.begin() + victim);
      EXPECT_NE(ScheduleSimulator(c.spec, c.plan, schedule).Run(), "")
          << "case " << i << " rank " << rank << " step " << step;
      ++damaged;
    }
    ASSERT_FALSE(HasFailure()) << Describe(c, intact);
  }
  EXPECT_GT(damaged, 1000);
}

// A flat ring passes each block on after one step, so a transfer between hosts has no more time.
TEST(DrawnSchedulesTest, TheSimulatorFindsReuseOfBytesInFlightBetweenHosts) {
  const AttentionSpec spec = DenseSpec(64, 64);
  const ShardPlan plan = MakeShardPlan(spec, Layout::kContiguous, 4);
  for (Direction direction : {Direction::kForward, Direction::kBackward}) {
    const ProgramRecipe recipe = RecipeOn(plan, ScheduleKind::kRing, direction);
    Schedule schedule = MakeSchedule(spec, plan, recipe);
    AssignLanes(schedule, {0, 0, 1, 1});
    EXPECT_EQ(ScheduleSimulator(spec, plan, schedule).Run(), "");
    int slow = 0;
    for (Program& program : schedule.programs) {
      for (Transfer& transfer : program.steps[0].transfers) {
        if (transfer.lane != Lane::kBetween) continue;
        transfer.steps = 2;
        ++slow;
      }
    }
    EXPECT_GT(slow, 0);
    const std::string error = ScheduleSimulator(spec, plan, schedule).Run();
    EXPECT_TRUE(absl::StrContains(error, "may be in flight for 2 steps, but a transfer of step 1"))
        << error;
  }
}

// Lanes describe transfers and change none of them.
TEST(DrawnSchedulesTest, LanesChangeNothingElse) {
  const AttentionSpec spec = DenseSpec(64, 64);
  const ShardPlan plan = MakeShardPlan(spec, Layout::kContiguous, 4);
  const ProgramRecipe recipe = RecipeOn(plan, ScheduleKind::kRing, Direction::kForward);
  const Schedule one_host = MakeSchedule(spec, plan, recipe);
  Schedule two_hosts = one_host;
  AssignLanes(two_hosts, {0, 0, 1, 1});
  EXPECT_EQ(ToString(two_hosts, spec), ToString(one_host, spec));
  const auto between = [&](int rank) { return two_hosts.programs[rank].SentBytes(Lane::kBetween); };
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(one_host.programs[rank].SentBytes(Lane::kBetween), 0);
    // Only the last rank of a host has a next rank on another host.
    EXPECT_EQ(between(rank), rank % 2 == 1 ? two_hosts.programs[rank].SentBytes() : 0) << rank;
  }
}

// 16 groups of one head in the memory of two, with the same number of bytes sent.
TEST(DrawnSchedulesTest, HeadsPerStepBoundsTheMemory) {
  AttentionSpec spec = DenseSpec(8192, 8192);
  spec.shape.num_heads = spec.shape.num_kv_heads = 16;
  spec.shape.head_dim = spec.shape.head_dim_v = 64;
  const ShardPlan plan = MakeShardPlan(spec, Layout::kContiguous, 8);
  for (Direction direction : {Direction::kForward, Direction::kBackward}) {
    const Schedule whole =
        MakeSchedule(spec, plan, RecipeOn(plan, ScheduleKind::kAllGather, direction));
    ProgramRecipe by_head = RecipeOn(plan, ScheduleKind::kAllGather, direction);
    by_head.heads_per_step = 1;
    const Schedule one = MakeSchedule(spec, plan, by_head);
    const int64_t gathered = BytesNamed(whole.programs[0], {"gathered"});
    EXPECT_EQ(BytesNamed(one.programs[0], {"gathered"}), gathered / 16 * 2);
    EXPECT_LT(one.programs[0].BufferBytes(), whole.programs[0].BufferBytes() - gathered * 3 / 4);
    EXPECT_EQ(one.programs[0].SentBytes(), whole.programs[0].SentBytes());
    EXPECT_EQ(one.programs[0].PairCount(), whole.programs[0].PairCount());
    EXPECT_EQ(one.programs[0].TileCount(), whole.programs[0].TileCount());
  }
}

TEST(DrawnSchedulesTest, MemoryShrinksWithTheRing) {
  AttentionSpec spec = DenseSpec(65536, 65536);
  spec.options.causal = true;
  for (Direction direction : {Direction::kForward, Direction::kBackward}) {
    std::vector<int64_t> bytes;
    for (int world_size : {2, 4, 8}) {
      const ShardPlan plan = MakeShardPlan(spec, Layout::kZigzag, world_size);
      const Schedule schedule =
          MakeSchedule(spec, plan, RecipeOn(plan, ScheduleKind::kRing, direction));
      bytes.push_back(schedule.programs[0].BufferBytes());
    }
    EXPECT_NEAR(static_cast<double>(bytes[2]) / bytes[1], 0.5, 0.02);
    EXPECT_LT(bytes[1], 0.63 * bytes[0]);
  }
}

}  // namespace
}  // namespace ringattn
