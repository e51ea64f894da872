#include "worker/service/slowdown.h"

#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "common/schedule/schedule.h"
#include "gtest/gtest.h"
#include "worker/testing/scalar_device.h"

namespace ringattn::worker {
namespace {

constexpr RequestKind kTerms{.score_terms = true};
constexpr RequestKind kTermsByEight{.score_terms = true, .head_dim_multiple = 8};

const std::vector<KernelRate> kRates = {
    {"fast", {DType::kFloat32}, Direction::kForward, 8e14},
    {"fast", {DType::kFloat32}, Direction::kForward, 4e14, kTermsByEight},
    {"slow", {DType::kFloat32}, Direction::kForward, 1e13, kTerms},
    {"slow", {DType::kBFloat16}, Direction::kForward, 5e12, kTerms},
    {"fast", {DType::kFloat32}, Direction::kBackward, 3e14, kTermsByEight},
};

AttentionSpec SpecWithTerms(int64_t head_dim) {
  AttentionSpec spec;
  spec.shape.seq_len_q = spec.shape.seq_len_kv = 16;
  spec.shape.cu_seqlens_q = spec.shape.cu_seqlens_k = {0, 16};
  spec.shape.head_dim = spec.shape.head_dim_v = head_dim;
  spec.options.alibi_slopes = {0.5f};
  return spec;
}

TEST(SlowdownTest, CallOnSlowerKernels) {
  const AttentionSpec spec = SpecWithTerms(8);
  EXPECT_EQ(SlowdownOfCall(spec, Direction::kForward, "fast", kRates), 1);
  // The family's slowest rate counts, for any dtype, because it may apply.
  EXPECT_EQ(SlowdownOfCall(spec, Direction::kForward, "slow", kRates), 80);
  // The rates predict this family, so there is no slowdown.
  EXPECT_EQ(SlowdownOfCall(SpecWithTerms(4), Direction::kForward, "slow", kRates), 1);
  // Never below 1. Without a rate there is no slowdown.
  EXPECT_EQ(SlowdownOfCall(SpecWithTerms(4), Direction::kForward, "fast", kRates), 1);
  EXPECT_EQ(SlowdownOfCall(spec, Direction::kBackward, "unknown", kRates), 1);
  EXPECT_EQ(SlowdownOfCall(spec, Direction::kForward, "slow", {}), 1);
}

class NamedCall : public PreparedCall {
 public:
  explicit NamedCall(std::string_view family) : family_(family) {}
  KernelName kernel() const override { return {.family = family_}; }
  EventRef Start(StartAfter, RunControl*) const override { return nullptr; }

 private:
  const std::string_view family_;
};

// The last call gets kernels of another family.
class UnevenDevice : public ScalarDevice {
 public:
  absl::StatusOr<PreparedCalls> Prepare(std::vector<KernelCall> calls) override {
    PreparedCalls prepared;
    for (size_t i = 0; i < calls.size(); ++i) {
      prepared.push_back(std::make_unique<NamedCall>(i + 1 < calls.size() ? "fast" : "slow"));
    }
    return prepared;
  }
};

TEST(SlowdownTest, OperationUsesItsSlowestCall) {
  AttentionSpec spec = SpecWithTerms(8);
  const ShardPlan plan = MakeShardPlan(spec, Layout::kContiguous, 2);
  UnevenDevice device;
  auto operation = Operation::Create(
      spec, plan,
      MakeProgram(spec, plan, RecipeOn(plan, ScheduleKind::kRing, Direction::kForward), /*rank=*/0),
      {0, 1}, &device);
  ASSERT_TRUE(operation.ok()) << operation.status();
  EXPECT_EQ(SlowdownOf(**operation, kRates), 80);
}

}  // namespace
}  // namespace ringattn::worker
