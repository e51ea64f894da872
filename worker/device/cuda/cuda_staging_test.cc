// Uploads and downloads through pinned staging memory, on a GPU or with fakes. Part of
// cuda_device_test.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <thread>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/base/monotonic_time.h"
#include "common/oracle/generator.h"
#include "gtest/gtest.h"
#include "worker/device/cuda/cuda_device.h"
#include "worker/device/cuda/test_device.h"

namespace ringattn::worker {
namespace {

std::vector<uint8_t> RandomBytes(int64_t bytes, uint64_t seed) {
  std::vector<uint8_t> data(bytes);
  for (int64_t i = 0; i < bytes; i += 8) {
    const uint64_t bits = oracle::RandomBits(seed, 1, i);
    std::memcpy(data.data() + i, &bits, std::min<int64_t>(8, bytes - i));
  }
  return data;
}

TEST(CudaStagingTest, ManyThreadsUploadThroughSmallPool) {
  auto device = MakeDevice(16 * kMiB);
  constexpr int kThreads = 6;
  constexpr int64_t kBytes = 37 * kMiB + 5, kChunk = 9 * kMiB + 1;
  auto target = *device->Allocate(kThreads * kBytes);
  std::vector<std::vector<uint8_t>> sources;
  for (int i = 0; i < kThreads; ++i) sources.push_back(RandomBytes(kBytes, i));
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      std::vector<EventRef> events;
      char* base = static_cast<char*>(target->data()) + i * kBytes;
      for (int64_t offset = 0; offset < kBytes; offset += kChunk) {
        const int64_t bytes = std::min(kChunk, kBytes - offset);
        auto upload = *device->BeginUpload({{base + offset, bytes}});
        for (int64_t at = 0; at < bytes; at += 65536) {
          ASSERT_TRUE(
              upload->Append(sources[i].data() + offset + at, std::min<int64_t>(65536, bytes - at))
                  .ok());
        }
        auto more = upload->Finish();
        ASSERT_TRUE(more.ok());
        events.insert(events.end(), more->begin(), more->end());
      }
      for (const EventRef& event : events) ASSERT_TRUE(event->Wait(Soon()).ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int i = 0; i < kThreads; ++i) {
    std::vector<uint8_t> result(kBytes);
    ASSERT_TRUE(
        device->CopyToHost(result.data(), static_cast<char*>(target->data()) + i * kBytes, kBytes)
            .ok());
    EXPECT_TRUE(result == sources[i]) << "thread " << i;
  }
}

// Targets that end within blocks, and blocks that end within targets.
TEST(CudaStagingTest, UploadFillsTargetsInOrder) {
  auto device = MakeDevice(16 * kMiB);
  const std::vector<int64_t> sizes = {3, 0, 5 * kMiB + 1, 7, 4 * kMiB, kMiB / 2};
  std::vector<std::unique_ptr<DeviceBuffer>> buffers;
  std::vector<UploadTarget> targets;
  int64_t total = 0;
  for (int64_t bytes : sizes) {
    buffers.push_back(*device->Allocate(std::max<int64_t>(bytes, 1)));
    targets.push_back({buffers.back()->data(), bytes});
    total += bytes;
  }
  const std::vector<uint8_t> source = RandomBytes(total, 3);
  auto upload = *device->BeginUpload(targets);
  for (int64_t at = 0; at < total; at += 99999) {
    ASSERT_TRUE(upload->Append(source.data() + at, std::min<int64_t>(99999, total - at)).ok());
  }
  auto events = upload->Finish();
  ASSERT_TRUE(events.ok());
  for (const EventRef& event : *events) ASSERT_TRUE(event->Wait(Soon()).ok());
  int64_t at = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    std::vector<uint8_t> result(sizes[i]);
    ASSERT_TRUE(device->CopyToHost(result.data(), targets[i].data, sizes[i]).ok());
    EXPECT_TRUE(std::equal(result.begin(), result.end(), source.begin() + at)) << "target " << i;
    at += sizes[i];
  }
}

// Reads a download as an exchange does: reads what is there, else waits for the notification.
std::vector<std::vector<uint8_t>> ReadAll(CudaDevice& device, std::vector<DeviceRange> ranges,
                                          int64_t max_bytes) {
  std::vector<std::vector<uint8_t>> result(ranges.size());
  absl::Mutex mutex;
  bool news = false;
  auto download = device.BeginDownload(ranges, [&] {
    absl::MutexLock lock(&mutex);
    news = true;
  });
  while (!download->finished()) {
    auto piece = download->Next(max_bytes);
    EXPECT_TRUE(piece.ok()) << piece.status();
    if (!piece.ok()) break;
    if (piece->has_value()) {
      std::vector<uint8_t>& target = result[(*piece)->range];
      EXPECT_EQ((*piece)->offset, static_cast<int64_t>(target.size()));
      EXPECT_LE((*piece)->bytes, max_bytes);
      target.insert(target.end(), (*piece)->data, (*piece)->data + (*piece)->bytes);
      continue;
    }
    absl::MutexLock lock(&mutex);
    if (!mutex.AwaitWithDeadline(absl::Condition(&news), Soon())) {
      ADD_FAILURE() << "no notice";
      break;
    }
    news = false;
  }
  EXPECT_GT(download->copy_time(), absl::ZeroDuration());
  return result;
}

TEST(CudaStagingTest, DownloadsAreOrderedAndConcurrent) {
  auto device = MakeDevice(16 * kMiB);
  const std::vector<uint8_t> first = RandomBytes(21 * kMiB + 3, 1), second = RandomBytes(7, 2);
  auto a = *device->Allocate(first.size()), b = *device->Allocate(second.size());
  ASSERT_TRUE(device->CopyFromHost(a->data(), first.data(), first.size()).ok());
  ASSERT_TRUE(device->CopyFromHost(b->data(), second.data(), second.size()).ok());
  const std::vector<DeviceRange> ranges = {{nullptr, 0},
                                           {a->data(), static_cast<int64_t>(first.size())},
                                           {b->data(), static_cast<int64_t>(second.size())}};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      const auto result = ReadAll(*device, ranges, i % 2 == 0 ? kMiB : 5 * kMiB + 11);
      EXPECT_TRUE(result[0].empty());
      EXPECT_TRUE(result[1] == first);
      EXPECT_TRUE(result[2] == second);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(device->usage().staging_used_bytes, 0);
}

// Half of the pool's eight blocks are for downloads, and one download may be four blocks ahead of
// its reader.
TEST(CudaStagingTest, PausedReaderLeavesBlocksToOthers) {
  auto device = MakeDevice(32 * kMiB);
  const std::vector<uint8_t> data = RandomBytes(30 * kMiB, 1);
  auto memory = *device->Allocate(data.size());
  ASSERT_TRUE(device->CopyFromHost(memory->data(), data.data(), data.size()).ok());
  const std::vector<DeviceRange> ranges = {{memory->data(), memory->bytes()}};
  auto resting = device->BeginDownload(ranges, [] {});
  for (int looks = 0; looks < 8;) {  // each call may copy ahead
    auto piece = resting->Next(1);
    ASSERT_TRUE(piece.ok()) << piece.status();
    piece->has_value() ? void(++looks) : std::this_thread::yield();
  }
  EXPECT_EQ(device->usage().staging_used_bytes, 2 * kStagingBlockBytes);
  EXPECT_TRUE(ReadAll(*device, ranges, kMiB)[0] == data);
}

// The service thread pauses for a millisecond at a time while calls are in flight.
TEST(CudaStagingTest, AReaderNextToACallGetsItsBytesAtOnce) {
  auto device = MakeDevice();
  auto memory = *device->Allocate(64 << 10);
  auto zeroed = *device->Allocate(64);
  PreparedCalls calls = Ready(*device, {ZeroCall{zeroed->data(), 64}});
  RunControl control;
  Gate gate(*CudaEventPool::ForDevice(0));
  EventRef call = device->Start(*calls[0], {gate.event()}, &control);
  std::vector<absl::Duration> times;
  for (int i = 0; i < 41; ++i) {
    absl::SleepFor(absl::Microseconds(2300));  // the thread pauses again
    const absl::Time begin = MonotonicNow();
    ReadAll(*device, {{memory->data(), memory->bytes()}}, kMiB);
    times.push_back(MonotonicNow() - begin);
  }
  std::sort(times.begin(), times.end());
  // A quarter of the times may be long on a busy machine. If readers waited for the pause, a third
  // of them would exceed this.
  EXPECT_LT(times[30], absl::Microseconds(600));
  gate.Open();
  EXPECT_TRUE(call->Wait(Soon()).ok());
}

TEST(CudaStagingTest, AbandonedDownloadKeepsReturnedRanges) {
  auto device = MakeDevice(16 * kMiB);
  const std::vector<uint8_t> data = RandomBytes(30 * kMiB, 1);
  auto memory = *device->Allocate(data.size());
  ASSERT_TRUE(device->CopyFromHost(memory->data(), data.data(), data.size()).ok());
  absl::Notification ready;
  auto download = device->BeginDownload({{memory->data(), memory->bytes()}}, [&] {
    if (!ready.HasBeenNotified()) ready.Notify();
  });
  auto first = download->Next(kMiB);
  if (first.ok() && !first->has_value()) {
    ASSERT_TRUE(ready.WaitForNotificationWithTimeout(absl::Seconds(20)));
    first = download->Next(kMiB);
  }
  ASSERT_TRUE(first.ok() && first->has_value());
  Download::HostRange piece = **first;
  first = std::nullopt;
  download.reset();
  memory.reset();
  EXPECT_EQ(std::memcmp(piece.data, data.data(), kMiB), 0);
  EXPECT_GT(device->usage().staging_used_bytes, 0);
  piece.keeper.reset();
  EXPECT_EQ(device->usage().staging_used_bytes, 0);
}

}  // namespace
}  // namespace ringattn::worker
