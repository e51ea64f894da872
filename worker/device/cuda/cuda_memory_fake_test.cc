// Memory in regions, with the fake CUDA.
#include "worker/device/cuda/cuda_memory.h"

#include <fcntl.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "worker/testing/fake_cuda/fake_cuda.h"
#include "worker/testing/fake_cuda/fake_vmm.h"

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

TEST(CudaMemoryTest, RegionsGrowAheadUpToLimit) {
  auto memory = InRegions(12 * kGiB);
  std::vector<std::unique_ptr<DeviceBuffer>> buffers;
  std::vector<int64_t> totals;
  for (int i = 0; i < 12; ++i) {
    buffers.push_back(*memory->Allocate(kGiB));
    if (totals.empty() || totals.back() != Bytes(*memory)) totals.push_back(Bytes(*memory));
  }
  for (int64_t& total : totals) total /= kGiB;
  EXPECT_EQ(totals, (std::vector<int64_t>{1, 2, 3, 5, 8, 12}));
  // Larger needs are met too, but without growing ahead.
  auto more = *memory->Allocate(3 * kGiB);
  EXPECT_EQ(Bytes(*memory), 15 * kGiB);
}

TEST(CudaMemoryTest, SmallNeedsDoNotGrowBeyondLimit) {
  auto memory = InRegions(9 * kGiB);
  std::vector<std::unique_ptr<DeviceBuffer>> buffers;
  for (int i = 0; i < 9; ++i) buffers.push_back(*memory->Allocate(kGiB));
  EXPECT_EQ(Bytes(*memory), 9 * kGiB);
}

// A run in progress reads the regions, and ending operations free memory, while a region is being
// added.
TEST(CudaMemoryTest, GrowthDoesNotBlockOtherCalls) {
  auto memory = InRegions(4 * kGiB);
  auto first = *memory->Allocate(kGiB);
  FakeVmm().hold_creates = true;
  std::thread grows([&] { EXPECT_TRUE(memory->Allocate(kGiB).ok()); });
  while (FakeVmm().held_creates == 0) std::this_thread::yield();
  absl::Notification asked;
  std::thread asks([&] {
    EXPECT_EQ(memory->regions().size(), 1u);
    first = nullptr;
    asked.Notify();
  });
  EXPECT_TRUE(asked.WaitForNotificationWithTimeout(absl::Seconds(20)));
  FakeVmm().hold_creates = false;
  grows.join();
  asks.join();
  EXPECT_EQ(Bytes(*memory), 2 * kGiB);
}

// The copies of an operation's tensors run at the same time, and one wait is enough.
TEST(CudaMemoryTest, SmallCopiesAreEnqueued) {
  auto memory = CudaMemory::Create(*CudaEventPool::ForDevice(0), /*in_regions=*/false, kGiB);
  ASSERT_TRUE(memory.ok()) << memory.status();
  const std::vector<std::string> inputs = {"one", "", "three"};
  std::vector<std::unique_ptr<DeviceBuffer>> buffers;
  std::vector<EventRef> events;
  for (size_t i = 0; i < inputs.size(); ++i) buffers.push_back(*(*memory)->Allocate(8));
  Faults().hold_copies = true;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto event = (*memory)->StartCopyFromHost(buffers[i]->data(), inputs[i].data(),
                                                    static_cast<int64_t>(inputs[i].size()));
    ASSERT_TRUE(event.ok()) << event.status();
    EXPECT_EQ(*event == nullptr, inputs[i].empty());
    if (*event != nullptr) events.push_back(*event);
  }
  for (const EventRef& event : events) EXPECT_FALSE(event->Done());
  Faults().hold_copies = false;
  for (const EventRef& event : events) EXPECT_TRUE(event->Wait(absl::InfiniteFuture()).ok());
  std::vector<std::string> outputs;
  for (const std::string& input : inputs) outputs.emplace_back(input.size(), '-');
  std::vector<DeviceCopy> copies;
  for (size_t i = 0; i < inputs.size(); ++i) {
    copies.push_back(
        {outputs[i].data(), buffers[i]->data(), static_cast<int64_t>(outputs[i].size())});
  }
  ASSERT_TRUE((*memory)->CopyAllToHost(copies).ok());
  EXPECT_EQ(outputs, inputs);
}

// Outputs that exceed the pinned memory.
TEST(CudaMemoryTest, LargerCopiesArriveToo) {
  auto memory = CudaMemory::Create(*CudaEventPool::ForDevice(0), /*in_regions=*/false, kGiB);
  ASSERT_TRUE(memory.ok()) << memory.status();
  const std::string input(200'000, 'x');
  auto buffer = *(*memory)->Allocate(200'000);
  ASSERT_TRUE((*memory)->CopyFromHost(buffer->data(), input.data(), 200'000).ok());
  std::string first(150'000, '-'), second(50'000, '-');
  const std::vector<DeviceCopy> copies = {
      {first.data(), buffer->data(), 150'000},
      {second.data(), static_cast<char*>(buffer->data()) + 150'000, 50'000}};
  ASSERT_TRUE((*memory)->CopyAllToHost(copies).ok());
  EXPECT_EQ(first + second, input);
}

// The driver's query is slow, and an operation's buffers are allocated and freed together.
TEST(CudaMemoryTest, LimitsDriverQueries) {
  for (const bool in_regions : {false, true}) {
    auto memory = CudaMemory::Create(*CudaEventPool::ForDevice(0), in_regions, kGiB);
    ASSERT_TRUE(memory.ok()) << memory.status();
    const int before = Faults().memory_queries;
    const absl::Time begin = absl::Now();
    std::vector<std::unique_ptr<DeviceBuffer>> buffers;
    for (int i = 0; i < 200; ++i) buffers.push_back(*(*memory)->Allocate(4096));
    buffers.clear();
    const auto most = 2 + static_cast<int>((absl::Now() - begin) / absl::Milliseconds(20));
    EXPECT_LE(Faults().memory_queries - before, most);
    EXPECT_GT((*memory)->device_used_bytes(), 0);
    absl::SleepFor(absl::Milliseconds(30));
    const int then = Faults().memory_queries;
    EXPECT_TRUE((*memory)->Allocate(1).ok());
    EXPECT_GT(Faults().memory_queries, then) << "but again after a while";
  }
}

absl::StatusOr<std::unique_ptr<CudaMemory>> Shared(RegionSharing sharing) {
  return CudaMemory::Create(*CudaEventPool::ForDevice(0), /*in_regions=*/true, kGiB, sharing);
}

TEST(CudaMemoryTest, SharesRegionsByDescriptorAndFreesThem) {
  const int handles = FakeVmm().handles, mappings = FakeVmm().mappings;
  auto memory = Shared(RegionSharing::kVmmOrIpc);
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ((*memory)->why_not_vmm(), "");
  auto beyond_one = (*memory)->Allocate(kGiB + 1);
  ASSERT_TRUE(beyond_one.ok()) << beyond_one.status();
  const auto regions = (*memory)->regions();
  ASSERT_EQ(regions.size(), 2u);
  for (const DeviceRegion& region : regions) {
    EXPECT_GE(region.descriptor, 0);
    EXPECT_EQ(region.bytes % (2 << 20), 0) << "whole pages";
  }
  EXPECT_GE(regions[1].bytes, kGiB + 1);
  EXPECT_EQ(FakeVmm().mappings, mappings + 2);
  const int descriptor = fcntl(regions[0].descriptor, F_DUPFD_CLOEXEC, 0);
  beyond_one->reset();
  memory->reset();
  EXPECT_EQ(FakeVmm().handles, handles);
  EXPECT_EQ(FakeVmm().mappings, mappings);
  EXPECT_EQ(FakeVmm().reservations, mappings);
  EXPECT_EQ(fcntl(regions[0].descriptor, F_GETFD), -1) << "it is closed";
  close(descriptor);
}

// If cuMemCreate is not available, legacy handles are used, unless descriptors are required.
TEST(CudaMemoryTest, FallsBackToCudaMallocWithoutDescriptors) {
  for (std::atomic<bool>* fault : {&FakeVmm().no_vmm, &FakeVmm().refuse_create}) {
    *fault = true;
    auto memory = Shared(RegionSharing::kVmmOrIpc);
    const auto required = Shared(RegionSharing::kVmm);
    *fault = false;
    ASSERT_TRUE(memory.ok()) << memory.status();
    EXPECT_EQ((*memory)->regions().at(0).descriptor, -1);
    EXPECT_NE((*memory)->why_not_vmm(), "");
    EXPECT_EQ(required.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(required.status().message(), (*memory)->why_not_vmm());
    auto later = (*memory)->Allocate(2 * kGiB);
    ASSERT_TRUE(later.ok()) << later.status();
    EXPECT_EQ((*memory)->regions().at(1).descriptor, -1) << "one kind for good";
  }
  auto legacy = Shared(RegionSharing::kIpc);
  ASSERT_TRUE(legacy.ok()) << legacy.status();
  EXPECT_EQ((*legacy)->regions().at(0).descriptor, -1);
  EXPECT_EQ((*legacy)->why_not_vmm(), "") << "cudaMalloc was requested";
}

TEST(CudaMemoryTest, ReportsWhatDoesNotFit) {
  auto memory = Shared(RegionSharing::kVmm);
  ASSERT_TRUE(memory.ok()) << memory.status();
  const absl::Status status = (*memory)->Allocate(int64_t{2} << 40).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_EQ((*memory)->regions().size(), 1u);
}

}  // namespace
}  // namespace ringattn::worker
