// CUDA virtual memory management: allocations that processes share as file descriptors. VmmRegion
// exports an allocation, VmmMapping imports one. Unlike CUDA's legacy handles, descriptors work
// across all namespaces.
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

// One allocation of a device, mapped for it. Immutable; callers synchronize accesses to the memory.
// The memory stays allocated while other processes have it mapped.
class VmmRegion {
 public:
  // Returns OK if the device has such memory and can share it, or FAILED_PRECONDITION with what it
  // lacks.
  static absl::Status CheckSupport(const CudaDriver& driver, int device);

  // Allocates `bytes`, rounded up to the device's pages, uninitialised. `events` and `driver` must
  // outlive it. Returns RESOURCE_EXHAUSTED if memory is short, or FAILED_PRECONDITION with the
  // driver call that failed.
  static absl::StatusOr<std::unique_ptr<VmmRegion>> Create(CudaEventPool* events,
                                                           const CudaDriver* driver, int64_t bytes);
  ~VmmRegion();
  VmmRegion(const VmmRegion&) = delete;
  VmmRegion& operator=(const VmmRegion&) = delete;

  char* data() const { return reinterpret_cast<char*>(address_); }
  int64_t bytes() const { return static_cast<int64_t>(bytes_); }
  // For SCM_RIGHTS; stays owned by this object.
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

// Another process's allocation, mapped for a device of this process until destruction.
class VmmMapping final : public ImportedMemory {
 public:
  // Maps `bytes` of the allocation that `descriptor` refers to, which stays the caller's and may be
  // closed afterwards. `gpu`: the index in this process of the GPU that should own the memory.
  // Errors:
  //   INVALID_ARGUMENT    not such an allocation, on another GPU, or too short
  //   RESOURCE_EXHAUSTED  with the driver call that failed
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
