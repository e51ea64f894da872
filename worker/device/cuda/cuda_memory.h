// CudaMemory: memory of one device. Freeing it does not wait for the device, as cudaFree
// does: operations come and go while others run. It comes either from CUDA's
// stream-ordered pool or from regions, of cuMemCreate or of cudaMalloc: only those can other
// processes map.
// Both grow with what is asked for and keep what they have.
#ifndef RINGATTN_WORKER_DEVICE_CUDA_CUDA_MEMORY_H_
#define RINGATTN_WORKER_DEVICE_CUDA_CUDA_MEMORY_H_

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "worker/device/cuda/cuda_event.h"
#include "worker/device/cuda/device_region.h"
#include "worker/device/cuda/extent_allocator.h"
#include "worker/device/cuda/vmm_memory.h"
#include "worker/device/device.h"

namespace ringattn::worker {

// Thread safe. Outlives its buffers.
class CudaMemory {
 public:
  // `in_regions`: everything comes from regions. There is one from the start. They grow by
  // more than what is asked for while all together have no more than `ahead_bytes`, beyond it
  // by the least that they grow by (1 GiB, 2 MiB when memory is short). FAILED_PRECONDITION with
  // what the device or its driver lacks if `sharing` is kVmm and cannot be had.
  static absl::StatusOr<std::unique_ptr<CudaMemory>> Create(
      CudaEventPool* events, bool in_regions, int64_t ahead_bytes,
      RegionSharing sharing = RegionSharing::kVmmOrIpc);
  ~CudaMemory();
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;

  // 256-byte aligned, uninitialised. RESOURCE_EXHAUSTED, with what is free, if there is
  // none. What was freed stays with the process, for the next allocation.
  absl::StatusOr<std::unique_ptr<DeviceBuffer>> Allocate(int64_t bytes);

  // Host-synchronous, apart from all other streams.
  absl::Status CopyFromHost(void* device, const void* host, int64_t bytes);
  absl::Status CopyToHost(void* host, const void* device, int64_t bytes);

  // By this process, through this class, and by anybody, as it was 20 ms at most before memory was
  // last taken or given. Both ask nothing of CUDA: heartbeats read them, and a call of CUDA may
  // wait for another.
  int64_t allocated_bytes() const { return allocated_bytes_.load(); }
  int64_t device_used_bytes() const { return device_used_bytes_.load(); }
  // What the driver says now.
  int64_t device_free_bytes() const;
  // Those of DeviceRegions; none unless in_regions. Waits for no call of CUDA either.
  std::vector<DeviceRegion> regions() const;
  // Why regions are cudaMalloc's though cuMemCreate's would do; empty unless that is so. Fixed.
  const std::string& why_not_vmm() const { return why_not_vmm_; }

 private:
  class Buffer;

  struct Region {
    DeviceRegion memory;
    ExtentAllocator extents;
    std::unique_ptr<VmmRegion> vmm;  // null: cudaMalloc's
  };

  CudaMemory(CudaEventPool* events, bool in_regions, int64_t ahead_bytes)
      : events_(events), in_regions_(in_regions), ahead_bytes_(ahead_bytes) {}
  absl::Status UsePool();
  absl::Status UseRegions(RegionSharing sharing);
  absl::StatusOr<void*> FromRegions(int64_t bytes);
  std::optional<void*> FromOneOf(int64_t bytes);
  // Adds a region with room for `bytes`.
  absl::Status Grow(int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(growing_);
  absl::Status AddRegion(int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(growing_);
  absl::StatusOr<Region> NewVmmRegion(int64_t bytes) const;
  absl::StatusOr<Region> NewLinearRegion(int64_t bytes) const;
  absl::Status NoRoomFor(int64_t bytes) const ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<void*> FromPool(int64_t bytes);
  void Free(void* data);
  absl::Status Copy(void* target, const void* source, int64_t bytes, cudaMemcpyKind kind);
  absl::Status WaitForStream();
  void Count(int64_t bytes);

  CudaEventPool* const events_;
  const bool in_regions_;
  const int64_t ahead_bytes_;
  const CudaDriver* vmm_driver_ = nullptr;  // null: regions are cudaMalloc's. As of Create
  std::string why_not_vmm_;                 // likewise
  cudaMemPool_t pool_ = nullptr;
  absl::Mutex growing_;  // before mutex_
  // No call of CUDA is made under it: a ring in progress asks for the regions.
  mutable absl::Mutex mutex_;
  std::vector<Region> regions_ ABSL_GUARDED_BY(mutex_);
  cudaStream_t stream_ = nullptr;  // orders allocations; carries the small copies
  std::atomic<int64_t> allocated_bytes_{0};
  std::atomic<int64_t> device_used_bytes_{0};
  std::atomic<int64_t> asked_at_{0};  // when device_used_bytes_ is of
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_CUDA_CUDA_MEMORY_H_
