// Events on the fake CUDA, whose streams can be full.
#include "worker/device/cuda/cuda_event.h"

#include <thread>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "worker/comm/nccl/fake/fake_cuda.h"

namespace ringattn {
namespace {

TEST(CudaEventTest, CanBeAskedWhileAFullStreamIsToWaitForIt) {
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

}  // namespace
}  // namespace ringattn
