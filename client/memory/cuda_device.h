// CudaDevice: copies to, from and within a GPU, and waiting for it, without CUDA's headers.
#ifndef RINGATTN_CLIENT_MEMORY_CUDA_DEVICE_H_
#define RINGATTN_CLIENT_MEMORY_CUDA_DEVICE_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/memory/cuda_driver.h"

namespace ringattn::client {

// A device's context on this thread, for as long as this lives.
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

// In the device's primary context, which the runtime and PyTorch use too. Everything blocks.
// Thread safe. Errors: INTERNAL naming a call of the driver.
class CudaDevice {
 public:
  // As this process counts them; kept for good. FAILED_PRECONDITION without a driver;
  // INVALID_ARGUMENT if there is no such device.
  static absl::StatusOr<const CudaDevice*> Get(int device);

  // Until everything that has been put on any of its streams, by anybody in this process, is done.
  absl::Status Synchronize() const;
  // Behind what the legacy default stream has been given; done when they return.
  absl::Status CopyToHost(void* host, uint64_t on_device, int64_t bytes) const;
  absl::Status CopyFromHost(uint64_t on_device, const void* host, int64_t bytes) const;
  // Likewise, but done only after Synchronize().
  absl::Status StartCopy(uint64_t to, uint64_t from, int64_t bytes) const;

 private:
  CudaDevice(const CudaDriver* driver, cuda::Context context)
      : driver_(*driver), context_(context) {}

  const CudaDriver& driver_;
  const cuda::Context context_;
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_MEMORY_CUDA_DEVICE_H_
