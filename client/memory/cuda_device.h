// CudaDevice: copies to, from and within a GPU, and synchronisation, without CUDA's headers.
// Tests: tests/cuda_memory/cuda_memory_fake_test.cc.
#ifndef RINGATTN_CLIENT_MEMORY_CUDA_DEVICE_H_
#define RINGATTN_CLIENT_MEMORY_CUDA_DEVICE_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/memory/cuda_driver.h"

namespace ringattn::client {

// Makes a device's context current on this thread during its lifetime.
class InContext {
 public:
  InContext(const CudaDriver& driver, cuda::Context context) : driver_(driver) {
    status_ = driver.Check("cuCtxPushCurrent", driver.CtxPushCurrent(context));
  }
  ~InContext() {
    cuda::Context context = nullptr;
    if (status_.ok()) driver_.CtxPopCurrent(&context);
  }
  InContext(const InContext&) = delete;
  InContext& operator=(const InContext&) = delete;
  const absl::Status& status() const { return status_; }

 private:
  const CudaDriver& driver_;
  absl::Status status_;
};

// Uses the device's primary context, as the CUDA runtime and PyTorch do. All calls block. Thread
// safe. Errors: INTERNAL naming the driver call that failed.
class CudaDevice {
 public:
  // Returns device number `device` in this process's numbering; it exists until the process ends.
  // FAILED_PRECONDITION without a driver; INVALID_ARGUMENT if there is no such device.
  static absl::StatusOr<const CudaDevice*> Get(int device);

  // Waits until all work on all streams of the device in this process has completed.
  absl::Status Synchronize() const;
  // Copies after the work that was submitted to the legacy default stream. Complete on return.
  absl::Status CopyToHost(void* host, uint64_t on_device, int64_t bytes) const;
  absl::Status CopyFromHost(uint64_t on_device, const void* host, int64_t bytes) const;
  // The same, but complete only after Synchronize().
  absl::Status StartCopy(uint64_t to, uint64_t from, int64_t bytes) const;

 private:
  CudaDevice(const CudaDriver* driver, cuda::Context context)
      : driver_(*driver), context_(context) {}

  const CudaDriver& driver_;
  const cuda::Context context_;
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_MEMORY_CUDA_DEVICE_H_
