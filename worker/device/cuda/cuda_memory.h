// CudaMemory: memory of one device from CUDA's stream-ordered pool. Freeing it does not
// wait for the device, as cudaFree does: operations come and go while others run.
#ifndef RINGATTN_WORKER_DEVICE_CUDA_CUDA_MEMORY_H_
#define RINGATTN_WORKER_DEVICE_CUDA_CUDA_MEMORY_H_

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/device/cuda/cuda_event.h"
#include "worker/device/device.h"

namespace ringattn {

// Thread safe. Outlives its buffers.
class CudaMemory {
 public:
  static absl::StatusOr<std::unique_ptr<CudaMemory>> Create(CudaEventPool* events);
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

 private:
  class Buffer;

  explicit CudaMemory(CudaEventPool* events) : events_(events) {}
  absl::Status Copy(void* target, const void* source, int64_t bytes, cudaMemcpyKind kind);
  absl::Status WaitForStream();
  void Count(int64_t bytes);

  CudaEventPool* const events_;
  cudaMemPool_t pool_ = nullptr;
  cudaStream_t stream_ = nullptr;  // orders allocations; carries the small copies
  std::atomic<int64_t> allocated_bytes_{0};
  std::atomic<int64_t> device_used_bytes_{0};
};

}  // namespace ringattn

#endif  // RINGATTN_WORKER_DEVICE_CUDA_CUDA_MEMORY_H_
