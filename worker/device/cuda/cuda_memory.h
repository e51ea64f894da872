// CudaMemory: memory of one device. Freeing it does not wait for the device, as cudaFree
// does: operations come and go while others run. It comes either from CUDA's
// stream-ordered pool, which grows with what is asked for, or from one region that is
// taken at the start: the only kind that other processes can map once and for all.
#ifndef RINGATTN_WORKER_DEVICE_CUDA_CUDA_MEMORY_H_
#define RINGATTN_WORKER_DEVICE_CUDA_CUDA_MEMORY_H_

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "worker/device/cuda/cuda_event.h"
#include "worker/device/cuda/device_region.h"
#include "worker/device/cuda/extent_allocator.h"
#include "worker/device/device.h"

namespace ringattn {

// Thread safe. Outlives its buffers.
class CudaMemory {
 public:
  // region_bytes > 0: everything comes from one region of that size, allocated here and
  // kept until destruction; RESOURCE_EXHAUSTED, with what is free, if there is less.
  static absl::StatusOr<std::unique_ptr<CudaMemory>> Create(CudaEventPool* events,
                                                            int64_t region_bytes);
  ~CudaMemory();
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;

  // 256-byte aligned, uninitialised. RESOURCE_EXHAUSTED, with what is free, if there is
  // none. What was freed stays with the process, for the next allocation.
  absl::StatusOr<std::unique_ptr<DeviceBuffer>> Allocate(int64_t bytes);

  // Host-synchronous, apart from all other streams.
  absl::Status CopyFromHost(void* device, const void* host, int64_t bytes);
  absl::Status CopyToHost(void* host, const void* device, int64_t bytes);

  // By this process, through this class, and by anybody, as of the last allocation. Both
  // ask nothing of CUDA: heartbeats read them, and a call of CUDA may wait for another.
  int64_t allocated_bytes() const { return allocated_bytes_.load(); }
  int64_t device_used_bytes() const { return device_used_bytes_.load(); }
  // What the driver says now.
  int64_t device_free_bytes() const;
  // Empty if there is none.
  DeviceRegion region() const { return region_; }

 private:
  class Buffer;

  explicit CudaMemory(CudaEventPool* events) : events_(events) {}
  absl::Status TakeRegion(int64_t bytes);
  absl::Status UsePool();
  absl::StatusOr<void*> FromRegion(int64_t bytes);
  absl::StatusOr<void*> FromPool(int64_t bytes);
  void Free(void* data);
  absl::Status Copy(void* target, const void* source, int64_t bytes, cudaMemcpyKind kind);
  absl::Status WaitForStream();
  void Count(int64_t bytes);

  CudaEventPool* const events_;
  cudaMemPool_t pool_ = nullptr;
  DeviceRegion region_;
  absl::Mutex mutex_;
  ExtentAllocator extents_ ABSL_GUARDED_BY(mutex_){0, 1};
  cudaStream_t stream_ = nullptr;  // orders allocations; carries the small copies
  std::atomic<int64_t> allocated_bytes_{0};
  std::atomic<int64_t> device_used_bytes_{0};
};

}  // namespace ringattn

#endif  // RINGATTN_WORKER_DEVICE_CUDA_CUDA_MEMORY_H_
