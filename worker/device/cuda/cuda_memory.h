// CudaMemory: memory of one device from CUDA's stream-ordered pool. Freeing it does not
// wait for the device, as cudaFree does: operations come and go while others run.
#ifndef RINGATTN_WORKER_DEVICE_CUDA_CUDA_MEMORY_H_
#define RINGATTN_WORKER_DEVICE_CUDA_CUDA_MEMORY_H_

#include <cuda_runtime_api.h>

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

  int64_t allocated_bytes() const;    // by this process, through this class
  int64_t device_used_bytes() const;  // by anybody
  int64_t device_free_bytes() const;

 private:
  class Buffer;

  explicit CudaMemory(CudaEventPool* events) : events_(events) {}
  absl::Status Copy(void* target, const void* source, int64_t bytes, cudaMemcpyKind kind);
  absl::Status WaitForStream();

  CudaEventPool* const events_;
  cudaMemPool_t pool_ = nullptr;
  cudaStream_t stream_ = nullptr;  // orders allocations; carries the small copies
};

}  // namespace ringattn

#endif  // RINGATTN_WORKER_DEVICE_CUDA_CUDA_MEMORY_H_
