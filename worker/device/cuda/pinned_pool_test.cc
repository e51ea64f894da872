#include "worker/device/cuda/pinned_pool.h"

#include <atomic>
#include <cstdlib>
#include <set>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "worker/device/host_event.h"

namespace ringattn::worker {
namespace {

constexpr int64_t kBlock = 64;

absl::Time Soon() { return absl::Now() + absl::Seconds(20); }

struct Counted {
  int allocated = 0;
  int freed = 0;
  PinnedPool::Source Source() {
    return {[this](int64_t bytes) -> absl::StatusOr<void*> {
              ++allocated;
              return std::malloc(bytes);
            },
            [this](void* memory) {
              ++freed;
              std::free(memory);
            }};
  }
};

TEST(PinnedPool, IsAllocatedOnceAndFreedWithTheLastBlock) {
  Counted counted;
  {
    PinnedPool::Block block;
    {
      auto pool = *PinnedPool::Create(8 * kBlock + 1, kBlock, counted.Source());
      EXPECT_EQ(pool->block_count(), 8);
      block = *pool->TakeForUpload(Soon());
      EXPECT_EQ(block.bytes(), kBlock);
      EXPECT_EQ(pool->used_bytes(), kBlock);
      block.data()[kBlock - 1] = 1;
    }
    EXPECT_EQ(counted.freed, 0);
  }
  EXPECT_EQ(counted.allocated, 1);
  EXPECT_EQ(counted.freed, 1);
}

TEST(PinnedPool, ReportsErrors) {
  Counted counted;
  EXPECT_EQ(PinnedPool::Create(3 * kBlock, kBlock, counted.Source()).status().code(),
            absl::StatusCode::kInvalidArgument);
  const auto none = PinnedPool::Create(
      4 * kBlock, kBlock,
      {[](int64_t) { return absl::ResourceExhaustedError("none"); }, [](void*) { FAIL(); }});
  EXPECT_EQ(none.status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(PinnedPool, BlocksDoNotOverlap) {
  Counted counted;
  auto pool = *PinnedPool::Create(8 * kBlock, kBlock, counted.Source());
  std::set<uint8_t*> seen;
  std::vector<PinnedPool::Block> held;
  for (int i = 0; i < 6; ++i) {
    held.push_back(*pool->TakeForUpload(Soon()));
    EXPECT_TRUE(seen.insert(held.back().data()).second);
    EXPECT_EQ((held.back().data() - *seen.begin()) % kBlock, 0);
  }
}

TEST(PinnedPool, UploadsAndDownloadsReserveBlocksForEachOther) {
  Counted counted;
  auto pool = *PinnedPool::Create(8 * kBlock, kBlock, counted.Source());
  std::vector<PinnedPool::Block> uploads, downloads;
  for (int i = 0; i < 6; ++i) uploads.push_back(*pool->TakeForUpload(Soon()));
  EXPECT_EQ(pool->TakeForUpload(absl::Now()).status().code(), absl::StatusCode::kUnavailable);
  for (int i = 0; i < 2; ++i) {
    downloads.push_back(*pool->TryTakeForDownload(/*ahead=*/false));
  }
  EXPECT_FALSE(pool->TryTakeForDownload(/*ahead=*/false).has_value()) << "none left";
  uploads.clear();
  for (int i = 0; i < 2; ++i) downloads.push_back(*pool->TryTakeForDownload(/*ahead=*/false));
  EXPECT_FALSE(pool->TryTakeForDownload(/*ahead=*/false).has_value())
      << "half of the blocks are not theirs";
  EXPECT_TRUE(pool->TakeForUpload(absl::Now() + absl::Seconds(1)).ok());
}

// In the proportion of the default pool, 64 blocks for 8 operations: seven stopped readers hold all
// they can, including one block each in gRPC, and the eighth still proceeds.
TEST(PinnedPool, StoppedReadersLeaveBlocksToActiveOne) {
  Counted counted;
  auto pool = *PinnedPool::Create(64 * kBlock, kBlock, counted.Source());
  std::vector<PinnedPool::Block> stuck;
  for (int reader = 0; reader < 7; ++reader) {
    stuck.push_back(*pool->TryTakeForDownload(/*ahead=*/false));  // held by gRPC
    stuck.push_back(*pool->TryTakeForDownload(/*ahead=*/false));
    for (int i = 0; i < 3; ++i) {
      auto block = pool->TryTakeForDownload(/*ahead=*/true);
      if (block.has_value()) stuck.push_back(*std::move(block));
    }
  }
  EXPECT_LE(stuck.size(), 32u - 2);
  for (int i = 0; i < 100; ++i) {
    auto sending = pool->TryTakeForDownload(/*ahead=*/false);
    ASSERT_TRUE(sending.has_value());
    ASSERT_TRUE(pool->TryTakeForDownload(/*ahead=*/false).has_value());
  }
}

TEST(PinnedPool, BlockReturnsWhenItsCopyIsDone) {
  Counted counted;
  auto pool = *PinnedPool::Create(4 * kBlock, kBlock, counted.Source());
  auto copied = std::make_shared<HostEvent>();
  pool->ReturnAfter(*pool->TakeForUpload(Soon()), copied);
  std::vector<PinnedPool::Block> held;
  for (int i = 0; i < 2; ++i) held.push_back(*pool->TakeForUpload(Soon()));
  EXPECT_EQ(pool->TakeForUpload(absl::Now()).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(pool->used_bytes(), 3 * kBlock);
  std::thread waiter([&] { held.push_back(*pool->TakeForUpload(Soon())); });
  copied->Finish(absl::OkStatus());
  waiter.join();
  held.clear();
  EXPECT_EQ(pool->used_bytes(), 0);
}

// More streams than blocks: each gets its turn, and all blocks are returned.
TEST(PinnedPool, UploadsTakeTurns) {
  Counted counted;
  auto pool = *PinnedPool::Create(4 * kBlock, kBlock, counted.Source());
  constexpr int kEach = 200;
  std::atomic<int> done{0};
  const auto stream = [&] {
    for (int i = 0; i < kEach; ++i) {
      auto block = pool->TakeForUpload(Soon());
      ASSERT_TRUE(block.ok());
    }
    ++done;
  };
  std::vector<std::thread> streams;
  for (int i = 0; i < 6; ++i) streams.emplace_back(stream);
  for (std::thread& thread : streams) thread.join();
  EXPECT_EQ(done, 6);
  EXPECT_EQ(pool->used_bytes(), 0);
}

TEST(PinnedPool, TimedOutWaiterDoesNotBlockQueue) {
  Counted counted;
  auto pool = *PinnedPool::Create(4 * kBlock, kBlock, counted.Source());
  std::vector<PinnedPool::Block> held;
  for (int i = 0; i < 3; ++i) held.push_back(*pool->TakeForUpload(Soon()));
  std::thread impatient(
      [&] { EXPECT_FALSE(pool->TakeForUpload(absl::Now() + absl::Milliseconds(20)).ok()); });
  impatient.join();
  std::thread patient([&] { EXPECT_TRUE(pool->TakeForUpload(Soon()).ok()); });
  held.clear();
  patient.join();
}

}  // namespace
}  // namespace ringattn::worker
