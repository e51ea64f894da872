// Forwards of longer rings whose devices wait for keys: each rank has one call, and each received
// block has separate memory (worker/executor/separate_blocks.h).
#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <variant>
#include <vector>

#include "common/schedule/schedule.h"
#include "gtest/gtest.h"
#include "tests/sweep/naive_device.h"
#include "tests/sweep/run_problem.h"
#include "worker/executor/run_in_process.h"

namespace ringattn::tests {
namespace {

constexpr int64_t kTokens = 60;

// Few K/V heads: the partial results take more memory than the blocks.
AttentionSpec SpecOf(bool causal) {
  AttentionSpec spec;
  spec.dtype = DType::kBFloat16;
  spec.shape = {.batch = 1,
                .seq_len_q = kTokens,
                .seq_len_kv = kTokens,
                .num_heads = 8,
                .num_kv_heads = 1,
                .head_dim = 16,
                .head_dim_v = 16,
                .cu_seqlens_q = {0, kTokens},
                .cu_seqlens_k = {0, kTokens}};
  spec.options.softmax_scale = 0.25;
  spec.options.causal = causal;
  return spec;
}

class CountingDevice : public NaiveDevice {
 public:
  explicit CountingDevice(int* forwards) : forwards_(forwards) {}
  absl::StatusOr<PreparedCalls> Prepare(std::vector<KernelCall> calls) override {
    *forwards_ +=
        static_cast<int>(std::count_if(calls.begin(), calls.end(), [](const KernelCall& call) {
          return std::holds_alternative<ForwardCall>(call);
        }));
    return NaiveDevice::Prepare(std::move(calls));
  }

 private:
  int* const forwards_;
};

std::vector<float> Values(const TensorMap& tensors, TensorId id, DType dtype) {
  const std::vector<uint8_t>& bytes = tensors.at(id);
  std::vector<float> values(bytes.size() / ElementBytes(dtype));
  ConvertToFloat(dtype, bytes.data(), values.data(), static_cast<int64_t>(values.size()));
  return values;
}

TEST(SeparateBlocks, OneCallOfEachRankGivesTheResultOfSteps) {
  for (const bool causal : {true, false}) {
    for (const Layout layout : {Layout::kZigzag, Layout::kContiguous}) {
      for (const int world_size : {3, 4, 5}) {
        SCOPED_TRACE(world_size);
        const AttentionSpec spec = SpecOf(causal);
        const ShardPlan plan = MakeShardPlan(spec, layout, world_size);
        const Schedule schedule =
            MakeSchedule(spec, plan, RecipeOn(plan, ScheduleKind::kRing, Direction::kForward));
        const TensorMap inputs =
            ToTensorMap(oracle::GenerateInputs(spec, oracle::DataKind::kNormal, 1, false));
        int forwards = 0;
        const auto found = RunInProcess(spec, plan, schedule, inputs, [&forwards] {
          return std::make_unique<CountingDevice>(&forwards);
        });
        ASSERT_TRUE(found.ok()) << found.status();
        // A contiguous causal rank also has steps without visible keys, which end its calls.
        if (!causal || layout == Layout::kZigzag) {
          EXPECT_EQ(forwards, world_size);
        }
        Placement placement;
        placement.layout = layout;
        placement.world_size = world_size;
        const auto expected = RunProblem(spec, placement, Direction::kForward, false, inputs,
                                         Engine::kInterpreter, KernelSet::kNaive);
        ASSERT_TRUE(expected.ok()) << expected.status();
        for (const TensorId id : {TensorId::kOut, TensorId::kLse}) {
          const DType dtype = id == TensorId::kOut ? DType::kBFloat16 : DType::kFloat32;
          const std::vector<float> a = Values(found->outputs, id, dtype);
          const std::vector<float> b = Values(*expected, id, dtype);
          ASSERT_EQ(a.size(), b.size());
          for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 0.02) << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace ringattn::tests
