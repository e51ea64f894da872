#include "worker/operation/operation_registry.h"

#include <memory>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "common/base/monotonic_time.h"
#include "common/schedule/schedule.h"
#include "gtest/gtest.h"
#include "worker/device/cpu/cpu_device.h"
#include "worker/executor/operation.h"

namespace ringattn::worker {
namespace {

class OperationRegistryTest : public testing::Test {
 protected:
  // Admits a forward of `members` workers, of which this one is the first.
  void Admit(const std::string& id, int members) {
    AttentionSpec spec;
    spec.shape.seq_len_q = spec.shape.seq_len_kv = 8;
    spec.shape.num_heads = spec.shape.num_kv_heads = 1;
    spec.shape.head_dim = spec.shape.head_dim_v = 8;
    spec.shape.cu_seqlens_q = spec.shape.cu_seqlens_k = {0, 8};
    spec.options.softmax_scale = 0.35;
    const ShardPlan plan = MakeShardPlan(spec, Layout::kContiguous, members);
    const auto schedule = members == 1 ? ScheduleKind::kSingle : ScheduleKind::kRing;
    Program program = MakeProgram(spec, plan, RecipeOn(plan, schedule, Direction::kForward), 0);
    std::vector<int> ranks;
    for (int rank = 0; rank < members; ++rank) ranks.push_back(rank);
    auto operation = Operation::Bind(spec, plan, std::move(program), ranks, &device_);
    ASSERT_TRUE(operation.ok()) << operation.status();
    const auto admitted = registry_.Admit({.id = id, .generation = 1}, *std::move(operation));
    ASSERT_TRUE(admitted.ok()) << admitted.status();
  }
  bool HasNoPeers() const { return registry_.WaitUntilNoPeers(MonotonicNow()); }

  CpuDevice device_{1, 1 << 20};
  MemoryBudget budget_{1 << 20};
  OperationRegistry registry_{&device_, &budget_, [](const OperationInfo&) {}};
};

TEST_F(OperationRegistryTest, WaitsForOperationsOfSeveralMembers) {
  EXPECT_TRUE(HasNoPeers());
  Admit("alone", 1);
  EXPECT_TRUE(HasNoPeers());
  EXPECT_FALSE(registry_.WaitUntilEmpty(MonotonicNow()));
  Admit("first", 2);
  Admit("second", 2);
  EXPECT_FALSE(HasNoPeers());
  registry_.Release("first", 1);
  EXPECT_FALSE(HasNoPeers());
  registry_.Release("second", 1);
  EXPECT_TRUE(registry_.WaitUntilNoPeers(MonotonicNow() + absl::Seconds(10)));
  registry_.EndAll("the test ends");
  EXPECT_TRUE(registry_.WaitUntilEmpty(MonotonicNow() + absl::Seconds(10)));
}

}  // namespace
}  // namespace ringattn::worker
