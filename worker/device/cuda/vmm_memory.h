// Memory of CUDA's virtual memory management, which processes share as file descriptors: what this
// one shows to others, and what others have shown to it. Unlike CUDA's legacy handles descriptors
// mean the same in every namespace.
#ifndef RINGATTN_WORKER_DEVICE_CUDA_VMM_MEMORY_H_
#define RINGATTN_WORKER_DEVICE_CUDA_VMM_MEMORY_H_

#include <cuda.h>

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/local_memory/scoped_descriptor.h"
#include "worker/device/cuda/cuda_driver.h"
#include "worker/device/cuda/cuda_event.h"
#include "worker/device/imported_memory.h"

namespace ringattn::worker {

// One allocation of a device, mapped for it. Immutable; what is done with the memory is the
// caller's. Where others have it mapped it stays in use after this is gone.
class VmmRegion {
 public:
  // OK if the device has such memory and can share it; FAILED_PRECONDITION saying what it lacks.
  static absl::Status CheckSupport(const CudaDriver& driver, int device);

  // `bytes`, rounded up to the device's pages, uninitialised. `events` and `driver` outlive it.
  // RESOURCE_EXHAUSTED without memory; FAILED_PRECONDITION naming the driver's call that refused.
  static absl::StatusOr<std::unique_ptr<VmmRegion>> Create(CudaEventPool* events,
                                                           const CudaDriver* driver, int64_t bytes);
  ~VmmRegion();
  VmmRegion(const VmmRegion&) = delete;
  VmmRegion& operator=(const VmmRegion&) = delete;

  char* data() const { return reinterpret_cast<char*>(address_); }
  int64_t bytes() const { return static_cast<int64_t>(bytes_); }
  // For SCM_RIGHTS; it stays this object's.
  int descriptor() const { return descriptor_.get(); }

 private:
  VmmRegion(CudaEventPool* events, const CudaDriver* driver) : events_(events), driver_(*driver) {}
  absl::Status Init(int64_t bytes);
  absl::Status MapForDevice();

  CudaEventPool* const events_;
  const CudaDriver& driver_;
  CUmemGenericAllocationHandle handle_ = 0;
  bool has_handle_ = false;
  CUdeviceptr address_ = 0;
  size_t bytes_ = 0;
  bool is_mapped_ = false;
  ScopedDescriptor descriptor_;
};

// Another process's allocation, mapped for a device of this one until it is gone.
class VmmMapping final : public ImportedMemory {
 public:
  // Of the `bytes` that are said to lie behind the descriptor, which stays the caller's and is of
  // no use to this object afterwards; `gpu`: whose memory it is said to be, as this process counts.
  // INVALID_ARGUMENT: it is of something else, of another GPU's or a shorter allocation.
  // RESOURCE_EXHAUSTED naming the driver's call that failed.
  static absl::StatusOr<std::unique_ptr<VmmMapping>> Map(CudaEventPool* events,
                                                         const CudaDriver* driver, int descriptor,
                                                         int64_t bytes, int gpu);
  ~VmmMapping() override;

  uint8_t* data() const override { return reinterpret_cast<uint8_t*>(address_); }

 private:
  VmmMapping(CudaEventPool* events, const CudaDriver* driver) : events_(events), driver_(*driver) {}
  absl::Status Init(int descriptor, int64_t bytes, int gpu);
  absl::Status Failed(const char* call, CUresult result) const;

  CudaEventPool* const events_;
  const CudaDriver& driver_;
  CUmemGenericAllocationHandle handle_ = 0;
  bool has_handle_ = false;
  CUdeviceptr address_ = 0;
  size_t bytes_ = 0;
  bool is_mapped_ = false;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_CUDA_VMM_MEMORY_H_
