// Memory in regions, on the fake CUDA.
#include "worker/device/cuda/cuda_memory.h"

#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "worker/testing/fake_cuda/fake_cuda.h"

namespace ringattn::worker {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;

std::unique_ptr<CudaMemory> InRegions(int64_t ahead_bytes) {
  auto memory = CudaMemory::Create(*CudaEventPool::ForDevice(0), /*in_regions=*/true, ahead_bytes);
  EXPECT_TRUE(memory.ok()) << memory.status();
  return *std::move(memory);
}

int64_t Bytes(const CudaMemory& memory) {
  int64_t bytes = 0;
  for (const DeviceRegion& region : memory.regions()) bytes += region.bytes;
  return bytes;
}

TEST(CudaMemoryTest, RegionsGrowAheadOfNeedUpToTheirBound) {
  auto memory = InRegions(12 * kGiB);
  std::vector<std::unique_ptr<DeviceBuffer>> buffers;
  std::vector<int64_t> totals;
  for (int i = 0; i < 12; ++i) {
    buffers.push_back(*memory->Allocate(kGiB));
    if (totals.empty() || totals.back() != Bytes(*memory)) totals.push_back(Bytes(*memory));
  }
  for (int64_t& total : totals) total /= kGiB;
  EXPECT_EQ(totals, (std::vector<int64_t>{1, 2, 3, 5, 8, 12}));
  // What is asked for comes all the same, and no more than that.
  auto more = *memory->Allocate(3 * kGiB);
  EXPECT_EQ(Bytes(*memory), 15 * kGiB);
}

TEST(CudaMemoryTest, RegionsDoNotGrowBeyondTheBoundForLittle) {
  auto memory = InRegions(9 * kGiB);
  std::vector<std::unique_ptr<DeviceBuffer>> buffers;
  for (int i = 0; i < 9; ++i) buffers.push_back(*memory->Allocate(kGiB));
  EXPECT_EQ(Bytes(*memory), 9 * kGiB);
}

// A ring in progress asks for the regions, and ends of operations give memory back.
TEST(CudaMemoryTest, NobodyWaitsForMemoryThatComes) {
  auto memory = InRegions(4 * kGiB);
  auto first = *memory->Allocate(kGiB);
  Faults().hold_mallocs = true;
  std::thread grows([&] { EXPECT_TRUE(memory->Allocate(kGiB).ok()); });
  while (Faults().held_mallocs == 0) std::this_thread::yield();
  absl::Notification asked;
  std::thread asks([&] {
    EXPECT_EQ(memory->regions().size(), 1u);
    first = nullptr;
    asked.Notify();
  });
  EXPECT_TRUE(asked.WaitForNotificationWithTimeout(absl::Seconds(20)));
  Faults().hold_mallocs = false;
  grows.join();
  asks.join();
  EXPECT_EQ(Bytes(*memory), 2 * kGiB);
}

}  // namespace
}  // namespace ringattn::worker
