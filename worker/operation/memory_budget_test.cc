#include "worker/operation/memory_budget.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

TEST(MemoryBudget, ReturnsBytesOnDestructionAndMove) {
  MemoryBudget budget(100);
  {
    auto first = budget.Take(60);
    ASSERT_TRUE(first.ok());
    EXPECT_EQ(first->bytes(), 60);
    MemoryBudget::Reservation moved = *std::move(first);
    EXPECT_EQ(budget.taken_bytes(), 60);
    auto second = budget.Take(40);
    ASSERT_TRUE(second.ok());
    moved = *std::move(second);
    EXPECT_EQ(moved.bytes(), 40);
  }
  EXPECT_EQ(budget.taken_bytes(), 0);
}

TEST(MemoryBudget, RejectsWithTheFigures) {
  MemoryBudget budget(100);
  auto first = budget.Take(30);
  auto refused = budget.Take(71);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(refused.status().message(),
            "needs 71 bytes, 70 are free (limit 100, 30 reserved by other operations)");
  EXPECT_TRUE(budget.Take(70).ok());
  EXPECT_FALSE(budget.Take(INT64_MAX).ok());
  EXPECT_TRUE(budget.Take(0).ok());
}

}  // namespace
}  // namespace ringattn::worker
