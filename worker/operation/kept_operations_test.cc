// Operations that run again with other inputs, and what is kept and evicted.
#include "worker/operation/kept_operations.h"

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/schedule/schedule.h"
#include "gtest/gtest.h"
#include "worker/comm/inproc/inproc_communicator.h"
#include "worker/device/cpu/cpu_device.h"
#include "worker/executor/executor.h"
#include "worker/operation/operation_registry.h"

namespace ringattn::worker {
namespace {

class KeptOperationsTest : public testing::Test {
 protected:
  static AttentionSpec SpecOf(int64_t tokens) {
    AttentionSpec spec;
    spec.shape.seq_len_q = spec.shape.seq_len_kv = tokens;
    spec.shape.num_heads = spec.shape.num_kv_heads = 2;
    spec.shape.head_dim = spec.shape.head_dim_v = 8;
    spec.shape.cu_seqlens_q = spec.shape.cu_seqlens_k = {0, tokens};
    spec.options.softmax_scale = 0.35;
    return spec;
  }
  std::unique_ptr<Operation> Bind(int64_t tokens) {
    const AttentionSpec spec = SpecOf(tokens);
    const ShardPlan plan = MakeShardPlan(spec, Layout::kContiguous, 1);
    Program program =
        MakeProgram(spec, plan, RecipeOn(plan, ScheduleKind::kSingle, Direction::kForward), 0);
    auto operation = Operation::Bind(spec, plan, std::move(program), {0}, &device_);
    EXPECT_TRUE(operation.ok()) << operation.status();
    return *std::move(operation);
  }
  static OperationInfo InfoOf(const std::string& id, const char* recipe) {
    OperationInfo info{.id = id, .generation = 1};
    if (recipe != nullptr) info.recipe = std::make_shared<const std::string>(recipe);
    return info;
  }
  std::shared_ptr<ShardOperation> Admit(const std::string& id, const char* recipe,
                                        int64_t tokens = 19) {
    auto admitted = registry_.Admit(InfoOf(id, recipe), Bind(tokens));
    EXPECT_TRUE(admitted.ok()) << admitted.status();
    return *std::move(admitted);
  }
  // Computes with inputs that depend on `seed`. Returns the output.
  std::vector<float> Run(ShardOperation& shard, uint32_t seed) {
    Operation& operation = shard.operation();
    for (TensorId id : {TensorId::kQ, TensorId::kK, TensorId::kV}) {
      auto* values = static_cast<float*>(operation.InputBuffer(id)->data());
      for (int64_t i = 0; i < operation.ShardBytes(id) / 4; ++i) {
        seed = seed * 1664525u + 1013904223u;
        values[i] = static_cast<float>(seed >> 8) / (1 << 24) * 2.0f - 1.0f;
      }
    }
    auto ring = MakeInProcessRing(1);
    const auto report = Execute(operation, device_, ring[0].get(), {}, nullptr);
    EXPECT_TRUE(report.ok()) << report.status();
    shard.SetFinished();
    std::vector<float> out(operation.ShardBytes(TensorId::kOut) / 4);
    std::memcpy(out.data(), operation.OutputBuffer(TensorId::kOut)->data(), 4 * out.size());
    return out;
  }
  void Release(std::shared_ptr<ShardOperation> operation) {
    registry_.Release(operation->info().id, 1);
  }

  CpuDevice device_{1, 1 << 20};
  MemoryBudget budget_{100'000};
  KeptOperations kept_{{.max_count = 4, .max_bytes = 50'000, .lease = absl::Seconds(100)}};
  int released_ = 0;
  OperationRegistry registry_{&device_, &budget_, [this](const OperationInfo&) { ++released_; },
                              &kept_};
};

TEST_F(KeptOperationsTest, RunsAgainWithOtherInputs) {
  budget_.SetReclaim([this](int64_t bytes) { return kept_.Evict(bytes); });
  std::vector<float> second;
  {
    std::shared_ptr<ShardOperation> fresh = Admit("1-1", nullptr);
    second = Run(*fresh, 2);
    Release(std::move(fresh));
  }
  EXPECT_EQ(kept_.stats().count, 0);  // it has no recipe
  std::shared_ptr<ShardOperation> first = Admit("1-2", "a");
  EXPECT_NE(Run(*first, 1), second);
  const int64_t bytes = first->reserved_bytes();
  Release(std::move(first));
  EXPECT_EQ(released_, 2);
  EXPECT_EQ(kept_.stats().count, 1);
  EXPECT_EQ(kept_.stats().bytes, bytes);
  EXPECT_EQ(budget_.taken_bytes(), bytes);

  EXPECT_FALSE(kept_.Take("b").has_value());
  std::optional<PreparedOperation> kept = kept_.Take("a");
  ASSERT_TRUE(kept.has_value());
  auto again = registry_.Admit(InfoOf("1-3", "a"), *std::move(kept));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_FALSE((*again)->InputsComplete());
  EXPECT_FALSE((*again)->finished());
  EXPECT_EQ(Run(**again, 2), second);
}

TEST_F(KeptOperationsTest, KeepsOnlyOperationsThatEndedWell) {
  std::shared_ptr<ShardOperation> operation = Admit("1-1", "a");
  Release(std::move(operation));  // did not run
  EXPECT_EQ(kept_.stats().count, 0);
  EXPECT_EQ(budget_.taken_bytes(), 0);
}

TEST_F(KeptOperationsTest, BudgetEvictsBeforeItRefuses) {
  budget_.SetReclaim([this](int64_t bytes) { return kept_.Evict(bytes); });
  for (const char* id : {"1-1", "1-2", "1-3"}) {
    std::shared_ptr<ShardOperation> operation = Admit(id, id);
    Run(*operation, 1);
    Release(std::move(operation));
  }
  const int64_t each = kept_.stats().bytes / 3;
  {
    const auto most = budget_.Take(budget_.limit_bytes() - each);
    ASSERT_TRUE(most.ok()) << most.status();
    EXPECT_EQ(kept_.stats().count, 1);
    EXPECT_EQ(kept_.stats().counts.evictions, 2);
    EXPECT_TRUE(budget_.Take(each).ok());
    EXPECT_EQ(kept_.stats().count, 0);
  }
  EXPECT_EQ(budget_.taken_bytes(), 0);
}

TEST_F(KeptOperationsTest, BudgetEvictsNothingForWhatNeverFits) {
  budget_.SetReclaim([this](int64_t bytes) { return kept_.Evict(bytes); });
  std::shared_ptr<ShardOperation> operation = Admit("1-1", "a");
  Run(*operation, 1);
  Release(std::move(operation));
  EXPECT_FALSE(budget_.Take(budget_.limit_bytes() + 1).ok());
  EXPECT_EQ(kept_.stats().count, 1);
}

}  // namespace
}  // namespace ringattn::worker
