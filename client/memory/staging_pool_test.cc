#include "client/memory/staging_pool.h"

#include <atomic>

#include "absl/time/clock.h"
#include "client/testing/fake_region_worker.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::client {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kMiB = 1 << 20;

class StagingPoolTest : public testing::Test {
 protected:
  SharedRegion::AttachCall AttachCall() {
    return [this](const v1::AttachRequest& request) -> absl::StatusOr<v1::AttachResponse> {
      ++calls_;
      if (refuses_) return absl::FailedPreconditionError("no worker takes host memory");
      v1::AttachResponse response;
      response.set_region_id("region");
      // Several regions at a time: the coordinator records for each which workers have it.
      if (request.region_id().empty()) {
        *response.add_points() = worker_.Point();
      } else {
        response.add_attached(worker_.name());
      }
      return response;
    };
  }
  std::unique_ptr<StagingPool> Make(StagingOptions options) {
    return std::make_unique<StagingPool>(
        options, [this] { return AttachCall(); }, index_);
  }

  FakeRegionWorker worker_{"worker"};
  std::atomic<int> calls_{0};
  std::atomic<bool> refuses_{false};
  const std::shared_ptr<RegionIndex> index_ = std::make_shared<RegionIndex>();
};

TEST_F(StagingPoolTest, ReturnedRegionsAreReused) {
  const auto pool = Make({.max_bytes = 64 * kMiB});
  auto first = pool->Take(3 * kMiB);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(index_->Find((*first)->data(), 3 * kMiB), *first);
  uint8_t* const data = (*first)->data();
  auto second = pool->Take(3 * kMiB);  // in addition to the first
  ASSERT_TRUE(second.ok());
  EXPECT_NE((*second)->data(), data);
  pool->GiveBack(*std::move(first), true);
  auto again = pool->Take(2 * kMiB + 1);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ((*again)->data(), data);
  EXPECT_EQ(pool->bytes(), 8 * kMiB);
  pool->GiveBack(*std::move(again), true);
  pool->GiveBack(*std::move(second), true);
}

TEST_F(StagingPoolTest, TheSmallestSufficientRegionIsTaken) {
  const auto pool = Make({.max_bytes = 64 * kMiB});
  auto large = pool->Take(20 * kMiB), small = pool->Take(4 * kMiB);
  uint8_t* const data = (*small)->data();
  pool->GiveBack(*std::move(large), true);
  pool->GiveBack(*std::move(small), true);
  auto taken = pool->Take(kMiB);
  EXPECT_EQ((*taken)->data(), data);
  pool->GiveBack(*std::move(taken), true);
}

TEST_F(StagingPoolTest, TheLimitCoversAllRegionsTogether) {
  const auto pool = Make({.max_bytes = 16 * kMiB});
  std::string why;
  EXPECT_FALSE(pool->MayTake(17 * kMiB, &why));
  EXPECT_THAT(why, HasSubstr("the limit of staging memory (16777216)"));
  EXPECT_EQ(pool->Take(17 * kMiB).status().code(), absl::StatusCode::kResourceExhausted);
  auto first = pool->Take(10 * kMiB);
  ASSERT_TRUE(first.ok());
  EXPECT_THAT(std::string(pool->Take(10 * kMiB).status().message()),
              HasSubstr("is left of the limit"));
  pool->GiveBack(*std::move(first), true);
  // Idle regions make room for a larger one.
  auto larger = pool->Take(14 * kMiB);
  ASSERT_TRUE(larger.ok()) << larger.status();
  EXPECT_EQ(pool->bytes(), 14 * kMiB);
  pool->GiveBack(*std::move(larger), true);
}

TEST_F(StagingPoolTest, NothingIsStagedWithoutALimit) {
  const auto pool = Make({.max_bytes = 0});
  std::string why;
  EXPECT_FALSE(pool->MayTake(1, &why));
  EXPECT_EQ(why, "staging is turned off");
  EXPECT_EQ(calls_, 0);
}

TEST_F(StagingPoolTest, AFailureIsCachedForAWhile) {
  refuses_ = true;
  const auto pool = Make({.max_bytes = 64 * kMiB, .refusal_kept = absl::Milliseconds(300)});
  const auto refused = pool->Take(32 * kMiB);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("no worker takes host memory"));
  EXPECT_EQ(pool->bytes(), 0);
  const int calls = calls_;
  std::string why;
  EXPECT_FALSE(pool->MayTake(kMiB, &why));
  EXPECT_THAT(why, HasSubstr("no worker takes host memory"));
  EXPECT_FALSE(pool->Take(kMiB).ok());
  EXPECT_EQ(calls_, calls);
  refuses_ = false;
  absl::SleepFor(absl::Milliseconds(350));
  auto taken = pool->Take(kMiB);
  ASSERT_TRUE(taken.ok()) << taken.status();
  pool->GiveBack(*std::move(taken), true);
}

TEST_F(StagingPoolTest, UnreusableRegionsAreUnmapped) {
  const auto pool = Make({.max_bytes = 64 * kMiB});
  auto taken = pool->Take(kMiB);
  ASSERT_TRUE(taken.ok());
  uint8_t* const data = (*taken)->data();
  pool->GiveBack(*std::move(taken), false);
  EXPECT_EQ(pool->bytes(), 0);
  EXPECT_EQ(index_->Find(data, 1), nullptr);
}

TEST_F(StagingPoolTest, ARegionIsPreparedFromTheSecondMissOn) {
  const auto pool = Make({.max_bytes = 64 * kMiB});
  bool prepare = true;
  EXPECT_EQ(pool->TakeReady(3 * kMiB, &prepare), nullptr);
  EXPECT_FALSE(prepare);  // a client that makes one call
  EXPECT_EQ(pool->TakeReady(3 * kMiB, &prepare), nullptr);
  EXPECT_TRUE(prepare);
  EXPECT_EQ(pool->TakeReady(3 * kMiB, &prepare), nullptr);
  EXPECT_FALSE(prepare);  // another caller prepares
  EXPECT_EQ(calls_, 0);
  pool->Prepare(3 * kMiB);
  std::shared_ptr<SharedRegion> ready = pool->TakeReady(4 * kMiB, &prepare);
  ASSERT_NE(ready, nullptr);
  EXPECT_FALSE(prepare);
  EXPECT_EQ(pool->TakeReady(3 * kMiB, &prepare), nullptr);
  EXPECT_TRUE(prepare);  // for two at a time
  pool->GiveBack(std::move(ready), true);
  pool->Close();
  const int calls = calls_;
  pool->Prepare(20 * kMiB);
  EXPECT_EQ(calls_, calls);
  EXPECT_EQ(pool->bytes(), 4 * kMiB);
}

TEST_F(StagingPoolTest, LongIdleRegionsAreFreed) {
  const auto pool = Make({.max_bytes = 64 * kMiB, .idle = absl::Milliseconds(500)});
  auto taken = pool->Take(kMiB);
  ASSERT_TRUE(taken.ok());
  pool->GiveBack(*std::move(taken), true);
  pool->Trim();
  EXPECT_GT(pool->bytes(), 0);
  absl::SleepFor(absl::Milliseconds(510));
  pool->Trim();
  EXPECT_EQ(pool->bytes(), 0);
  for (int i = 0; i < 1000 && worker_.has_region(); ++i) absl::SleepFor(absl::Milliseconds(5));
  EXPECT_FALSE(worker_.has_region());
}

TEST_F(StagingPoolTest, ARegionThatNoWorkerHasAttachedIsNotUsed) {
  const auto pool = Make({.max_bytes = 64 * kMiB});
  auto taken = pool->Take(kMiB);
  ASSERT_TRUE(taken.ok());
  const std::shared_ptr<SharedRegion> region = *taken;
  pool->GiveBack(*std::move(taken), true);
  refuses_ = true;
  worker_.DropRegions();
  for (int i = 0; i < 1000 && !region->workers().empty(); ++i) {
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_EQ(pool->Take(kMiB).status().code(), absl::StatusCode::kFailedPrecondition);
  bool prepare = false;
  EXPECT_EQ(pool->TakeReady(kMiB, &prepare), nullptr);
  EXPECT_EQ(pool->bytes(), 2 * kMiB);  // its own, until it has been idle for long
}

TEST(AvailableMemoryTest, IsPartOfTheMachinesMemory) {
  EXPECT_GT(AvailableMemoryBytes(), 1 << 20);
  EXPECT_LE(AvailableMemoryBytes(), int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE));
}

}  // namespace
}  // namespace ringattn::client
