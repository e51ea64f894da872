// CudaMemory: memory of one device. Freeing it does not wait for the device, unlike cudaFree, so
// operations can start and end while others run. Memory comes from CUDA's stream-ordered pool, or
// from regions made by cuMemCreate or cudaMalloc, which other processes can map. Both grow on
// demand and never shrink.
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
#include "absl/types/span.h"
#include "worker/device/cuda/cuda_event.h"
#include "worker/device/cuda/device_region.h"
#include "worker/device/cuda/extent_allocator.h"
#include "worker/device/cuda/vmm_memory.h"
#include "worker/device/device.h"

namespace ringattn::worker {

// Thread safe. Must outlive its buffers.
class CudaMemory {
 public:
  // With `in_regions`, all memory comes from regions, one of which exists from the start. While all
  // regions together stay within `ahead_bytes`, they grow by more than is needed; beyond that, by
  // the smallest unit (1 GiB, or 2 MiB if memory is short). Returns FAILED_PRECONDITION, with what
  // the device or driver lacks, if `sharing` is kVmm and not available.
  static absl::StatusOr<std::unique_ptr<CudaMemory>> Create(
      CudaEventPool* events, bool in_regions, int64_t ahead_bytes,
      RegionSharing sharing = RegionSharing::kVmmOrIpc);
  ~CudaMemory();
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;

  // Returns uninitialised memory, aligned to 256 bytes. Returns RESOURCE_EXHAUSTED, with what is
  // free, if there is none. Freed memory stays with the process for later allocations.
  absl::StatusOr<std::unique_ptr<DeviceBuffer>> Allocate(int64_t bytes);

  // Host-synchronous, independent of all other streams.
  absl::Status CopyFromHost(void* device, const void* host, int64_t bytes);
  absl::Status CopyToHost(void* host, const void* device, int64_t bytes);
  // Device::StartCopyFromHost and Device::CopyAllToHost.
  absl::StatusOr<EventRef> StartCopyFromHost(void* device, const void* host, int64_t bytes);
  absl::Status CopyAllToHost(absl::Span<const DeviceCopy> copies);

  // Bytes allocated through this class, and bytes of the device that any process uses, at most 20
  // ms old at the last allocation or release. Neither calls CUDA: heartbeats read them, and a CUDA
  // call may block on another.
  int64_t allocated_bytes() const { return allocated_bytes_.load(); }
  int64_t device_used_bytes() const { return device_used_bytes_.load(); }
  // Asks the driver.
  int64_t device_free_bytes() const;
  // The regions for DeviceRegions; empty unless in_regions is set. Does not block on CUDA either.
  std::vector<DeviceRegion> regions() const;
  // Why regions come from cudaMalloc although cuMemCreate was preferred; empty otherwise. Constant.
  const std::string& why_not_vmm() const { return why_not_vmm_; }

 private:
  class Buffer;

  struct Region {
    DeviceRegion memory;
    ExtentAllocator extents;
    std::unique_ptr<VmmRegion> vmm;  // null: from cudaMalloc
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
  const CudaDriver* vmm_driver_ =
      nullptr;               // null: regions come from cudaMalloc. Constant after Create
  std::string why_not_vmm_;  // constant after Create
  cudaMemPool_t pool_ = nullptr;
  absl::Mutex growing_;  // acquired before mutex_
  // No CUDA call is made under it: a run in progress reads the regions.
  mutable absl::Mutex mutex_;
  std::vector<Region> regions_ ABSL_GUARDED_BY(mutex_);
  cudaStream_t stream_ = nullptr;  // orders allocations and carries the small copies
  absl::Mutex bounce_mutex_;
  // Pinned memory of kBounceBytes. Copies to other host memory would each wait for the stream.
  char* bounce_ ABSL_PT_GUARDED_BY(bounce_mutex_) = nullptr;  // constant after Create
  std::atomic<int64_t> allocated_bytes_{0};
  std::atomic<int64_t> device_used_bytes_{0};
  std::atomic<int64_t> asked_at_{0};  // time of device_used_bytes_
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_CUDA_CUDA_MEMORY_H_
