// Memory that every schedule allocates, counted by the devices of a ring that runs it: it equals
// the plan's figure; and which part of it falls with the ring size.
#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "common/plan/planner.h"
#include "gtest/gtest.h"
#include "tests/sweep/run_problem.h"
#include "worker/device/cpu/cpu_device.h"
#include "worker/executor/run_in_process.h"

namespace ringattn::tests {
namespace {

using worker::CpuDevice;
using worker::DeviceBuffer;

// A seed's case, 8 heads of 64 in fp32, at 1/64 of its length.
constexpr int64_t kTokens = 512;

AttentionSpec SpecOf(int64_t keys) {
  AttentionSpec spec;
  spec.shape = {.batch = 1,
                .seq_len_q = kTokens,
                .seq_len_kv = keys,
                .num_heads = 8,
                .num_kv_heads = 8,
                .head_dim = 64,
                .head_dim_v = 64,
                .cu_seqlens_q = {0, kTokens},
                .cu_seqlens_k = {0, keys}};
  spec.options.softmax_scale = 0.125;
  return spec;
}

class CountingDevice : public CpuDevice {
 public:
  explicit CountingDevice(int64_t* bytes) : CpuDevice(1, int64_t{1} << 30), bytes_(bytes) {}

  absl::StatusOr<std::unique_ptr<DeviceBuffer>> Allocate(int64_t bytes) override {
    *bytes_ += bytes;
    return CpuDevice::Allocate(bytes);
  }

 private:
  int64_t* const bytes_;
};

struct Setting {
  const char* name;
  ScheduleKind kind;
  int64_t heads_per_step = 0;
};
constexpr Setting kSettings[] = {{"ring", ScheduleKind::kRing},
                                 {"all_gather", ScheduleKind::kAllGather},
                                 {"all_gather(1)", ScheduleKind::kAllGather, 1},
                                 {"pass_q", ScheduleKind::kPassQ},
                                 {"replicated_q", ScheduleKind::kReplicatedQ}};

// Bytes that the busiest rank allocated; they are the plan's, on every rank.
int64_t Allocated(const Setting& setting, int world_size, Direction direction,
                  const AttentionSpec& spec) {
  PlanChoice choice;
  choice.schedule = setting.kind;
  choice.layout = Layout::kContiguous;
  choice.world_size = world_size;
  choice.heads_per_step = setting.heads_per_step;
  choice.recompute_forward = direction == Direction::kBackward;
  PlannerInputs workers;
  workers.ready_workers = world_size;
  const absl::StatusOr<Plan> plan = PlanRequest(spec, direction, choice, workers);
  EXPECT_TRUE(plan.ok()) << plan.status();
  const Schedule schedule = MakeSchedule(spec, plan->shards, plan->recipe);
  std::vector<int64_t> bytes(world_size, 0);
  int made = 0;
  const auto result = worker::RunInProcess(
      spec, plan->shards, schedule,
      ToTensorMap(oracle::GenerateInputs(spec, oracle::DataKind::kNormal, 1, true)),
      [&] { return std::make_unique<CountingDevice>(&bytes[made++]); });
  EXPECT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(bytes, plan->buffer_bytes) << setting.name << " over " << world_size;
  return *std::max_element(bytes.begin(), bytes.end());
}

int64_t Allocated(const Setting& setting, int world_size, Direction direction, int64_t keys) {
  return Allocated(setting, world_size, direction, SpecOf(keys));
}

struct Parts {
  double keys = 0;  // what twice the keys take beyond half of them
  double queries = 0;
};

Parts PartsOf(const Setting& setting, int world_size, Direction direction) {
  const auto whole = static_cast<double>(Allocated(setting, world_size, direction, kTokens));
  const auto half = static_cast<double>(Allocated(setting, world_size, direction, kTokens / 2));
  return {2 * (whole - half), whole - 2 * (whole - half)};
}

TEST(ScheduleMemory, AsPlannedAndAsTheScheduleSays) {
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    const bool backward = direction == Direction::kBackward;
    for (const Setting& setting : kSettings) {
      std::map<int, Parts> parts;
      for (const int world_size : {1, 2, 4, 8}) {
        parts[world_size] = PartsOf(setting, world_size, direction);
        std::printf("%s %-13s W=%d  K/V part %.3f MB, Q part %.3f MB\n",
                    backward ? "backward" : "forward ", setting.name, world_size,
                    parts[world_size].keys / 1e6, parts[world_size].queries / 1e6);
      }
      SCOPED_TRACE(setting.name);
      // From 2 on a ring's forward holds two blocks, however many ranks there are.
      const bool falls =
          KeepsKeysInPlace(setting.kind) || (setting.kind == ScheduleKind::kRing && !backward);
      const double keys = parts[8].keys * 8 / (parts[2].keys * 2);
      const double queries = parts[8].queries * 8 / (parts[2].queries * 2);
      if (falls) {
        EXPECT_NEAR(keys, 1.0, 0.1);
      }
      if (KeepsKeysInPlace(setting.kind)) {  // the shard alone
        EXPECT_NEAR(parts[8].keys * 8 / parts[1].keys, 1.0, 0.1);
      }
      if (setting.kind == ScheduleKind::kReplicatedQ) {
        for (const int world_size : {2, 4, 8}) {
          EXPECT_GT(parts[world_size].queries, 0.95 * parts[1].queries);
          EXPECT_LT(parts[world_size].queries, 1.35 * parts[1].queries);
        }
      } else if (setting.kind != ScheduleKind::kPassQ) {
        EXPECT_NEAR(queries, 1.0, setting.heads_per_step == 0 ? 0.1 : 0.2);
      } else {
        EXPECT_LT(parts[8].queries, 0.5 * parts[2].queries);
      }
      if (setting.heads_per_step != 0) {
        const Parts all = PartsOf(kSettings[1], 8, direction);
        EXPECT_LT(parts[8].keys, 0.6 * all.keys);
      }
    }
  }
}

// Tensors of pairs, and the copies of a dilated problem's parts, are in the plan as well; a bias
// lies with its queries, or with its keys.
TEST(ScheduleMemory, AsPlannedWithPairTensorsAndParts) {
  AttentionSpec pairs = SpecOf(kTokens / 2);
  pairs.options.bias = BiasForm{.per_head = true, .gradient = true};
  pairs.options.mask = MaskForm{.per_batch = true};
  AttentionSpec ids = SpecOf(kTokens / 2);
  ids.options.segment_ids = true;
  AttentionSpec dilated = SpecOf(kTokens);
  dilated.options.dilation_levels = {{64, 1, {}, 0, 8}, {256, 2, {}, 0, 8}, {512, 4, {}, 0, 4}};
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    for (const Setting& setting : kSettings) {
      SCOPED_TRACE(setting.name);
      std::map<int, int64_t> with_pairs;
      for (const int world_size : {1, 2, 4, 8}) {
        Allocated(setting, world_size, direction, ids);
        if (setting.heads_per_step == 0) Allocated(setting, world_size, direction, dilated);
        with_pairs[world_size] = Allocated(setting, world_size, direction, pairs) -
                                 Allocated(setting, world_size, direction, kTokens / 2);
      }
      // bias and dbias [8, 512, 256] fp32, the mask a byte each; of heads in groups copies as well.
      const int64_t bias = 8 * kTokens * (kTokens / 2) * 4;
      const int64_t whole =
          kTokens * (kTokens / 2) + (direction == Direction::kForward ? bias : 2 * bias);
      if (setting.heads_per_step != 0) continue;
      for (const auto& [world_size, bytes] : with_pairs) EXPECT_EQ(bytes, whole / world_size);
    }
  }
}

}  // namespace
}  // namespace ringattn::tests
