// What the parts of cuda_device_test share: the device that they ask, on a GPU or on fakes.
#ifndef RINGATTN_WORKER_DEVICE_CUDA_TEST_DEVICE_H_
#define RINGATTN_WORKER_DEVICE_CUDA_TEST_DEVICE_H_

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "worker/device/cuda/cuda_device.h"

namespace ringattn::worker {

inline constexpr int64_t kMiB = int64_t{1} << 20;

inline absl::Time Soon() { return absl::Now() + absl::Seconds(20); }

// Of all devices that MakeDevice made.
inline std::atomic<int> times_broken{0};

// The first GPU. Nothing goes without one, so the program ends if there is none.
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

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_CUDA_TEST_DEVICE_H_
