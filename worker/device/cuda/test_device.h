// Shared by the parts of cuda_device_test: the device under test, on a GPU or with fakes.
#ifndef RINGATTN_WORKER_DEVICE_CUDA_TEST_DEVICE_H_
#define RINGATTN_WORKER_DEVICE_CUDA_TEST_DEVICE_H_

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "worker/device/cuda/cuda_device.h"

namespace ringattn::worker {

inline constexpr int64_t kMiB = int64_t{1} << 20;

inline absl::Time Soon() { return absl::Now() + absl::Seconds(20); }

// Calls of on_broken on all devices that MakeDevice created.
inline std::atomic<int> times_broken{0};

// Creates the device for the first GPU. Exits the program if there is none.
inline std::unique_ptr<CudaDevice> MakeDevice(int64_t pinned_pool_bytes = 32 * kMiB) {
  auto device = CudaDevice::Create({.device = 0,
                                    .pinned_pool_bytes = pinned_pool_bytes,
                                    .on_broken = [](const std::string&) { ++times_broken; }});
  if (!device.ok()) {
    ADD_FAILURE() << device.status();
    std::exit(1);
  }
  return *std::move(device);
}

// Work on its own stream that ends when the test opens the gate.
class Gate {
 public:
  explicit Gate(CudaEventPool* pool) : event_(std::make_shared<CudaEvent>(pool, nullptr, 0)) {
    EXPECT_TRUE(pool->UseDevice().ok());
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    EXPECT_TRUE(event_->RecordBegin(stream_).ok());
    EXPECT_EQ(cudaLaunchHostFunc(
                  stream_,
                  [](void* open) { static_cast<absl::Notification*>(open)->WaitForNotification(); },
                  &open_),
              cudaSuccess);
    EXPECT_TRUE(event_->RecordEnd(stream_).ok());
  }
  ~Gate() {
    if (!open_.HasBeenNotified()) open_.Notify();
    (void)event_->Wait(Soon());
    (void)cudaStreamDestroy(stream_);
  }
  void Open() { open_.Notify(); }
  EventRef event() const { return event_; }

 private:
  absl::Notification open_;
  cudaStream_t stream_ = nullptr;
  const std::shared_ptr<CudaEvent> event_;
};

inline PreparedCalls Ready(CudaDevice& device, std::vector<KernelCall> calls) {
  auto prepared = device.Prepare(std::move(calls));
  EXPECT_TRUE(prepared.ok()) << prepared.status();
  return *std::move(prepared);
}

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_CUDA_TEST_DEVICE_H_
