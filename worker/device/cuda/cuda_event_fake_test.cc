// Events with the fake CUDA, whose streams can be full.
#include "worker/device/cuda/cuda_event.h"

#include <thread>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "worker/testing/fake_cuda/fake_cuda.h"

namespace ringattn::worker {
namespace {

TEST(CudaEventTest, CanBeQueriedWhileFullStreamWaits) {
  CudaEventPool* const pool = *CudaEventPool::ForDevice(0);
  ASSERT_TRUE(pool->UseDevice().ok());
  cudaStream_t first = nullptr, full = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaStreamCreateWithFlags(&full, cudaStreamNonBlocking), cudaSuccess);
  absl::Notification go_on;
  for (cudaStream_t stream : {first, full}) {
    FakeCudaEnqueue(stream, [&] { go_on.WaitForNotification(); });
  }
  FakeCudaEnqueue(full, [] {});
  CudaEvent event(pool, nullptr, 0);
  ASSERT_TRUE(event.RecordEnd(first).ok());
  Faults().stream_depth = 1;
  std::thread waits([&] { EXPECT_TRUE(event.MakeStreamWait(full).ok()); });
  while (Faults().full_streams == 0) std::this_thread::yield();
  absl::Notification asked;
  std::thread asks([&] {
    EXPECT_FALSE(event.Done());
    asked.Notify();
  });
  EXPECT_TRUE(asked.WaitForNotificationWithTimeout(absl::Seconds(20)));
  Faults().stream_depth = 0;
  go_on.Notify();
  waits.join();
  asks.join();
  EXPECT_TRUE(event.Wait(absl::Now() + absl::Seconds(20)).ok());
  for (cudaStream_t stream : {first, full}) {
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  }
}

// No measurement of the clocks is good and there is no time for many, so the best one must do.
TEST(CudaEventTest, MapsClockOfSlowDevice) {
  Faults().record_ms = 150;
  const absl::StatusOr<CudaEventPool*> pool = CudaEventPool::ForDevice(1);
  Faults().record_ms = 0;
  ASSERT_TRUE(pool.ok()) << pool.status();
  ASSERT_TRUE((*pool)->UseDevice().ok());
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  CudaEvent event(*pool, nullptr, 0);
  const absl::Time begin = absl::Now();
  ASSERT_TRUE(event.RecordEnd(stream).ok());
  ASSERT_TRUE(event.Wait(absl::Now() + absl::Seconds(20)).ok());
  // Off by half of the measurement's window.
  EXPECT_GT(event.end_time(), begin - absl::Seconds(1));
  EXPECT_LT(event.end_time(), absl::Now() + absl::Seconds(1));
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

}  // namespace
}  // namespace ringattn::worker
