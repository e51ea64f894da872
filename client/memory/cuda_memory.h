// CudaMemory: GPU memory that this process can share with others, allocated here or by the caller.
// Tests: tests/cuda_memory/cuda_memory_fake_test.cc.
#ifndef RINGATTN_CLIENT_MEMORY_CUDA_MEMORY_H_
#define RINGATTN_CLIENT_MEMORY_CUDA_MEMORY_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/memory/cuda_driver.h"
#include "common/local_memory/attach_protocol.h"
#include "common/local_memory/scoped_descriptor.h"

namespace ringattn::client {

// Thread safe, except for accesses to the memory itself.
class CudaMemory {
 public:
  // Allocates uninitialised memory with cuMemCreate, which any process can map, rounded up to the
  // GPU's pages (2 MiB). Errors: FAILED_PRECONDITION without a driver; INVALID_ARGUMENT for 0 bytes
  // or a device that does not exist; RESOURCE_EXHAUSTED without memory.
  static absl::StatusOr<std::shared_ptr<const CudaMemory>> Allocate(int device, int64_t bytes);
  // Allocates memory of cudaMalloc's kind, for comparison. It is shared by CUDA's legacy handle.
  static absl::StatusOr<std::shared_ptr<const CudaMemory>> AllocateLinear(int device,
                                                                          int64_t bytes);
  // Shares memory that the caller keeps. INVALID_ARGUMENT with the reason if no other process can
  // map it.
  static absl::StatusOr<std::shared_ptr<const CudaMemory>> Adopt(void* data, int64_t bytes);
  // Unmaps what this object has allocated. It stays allocated while others have it mapped.
  ~CudaMemory();

  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;

  uint8_t* data() const { return data_; }  // on the GPU
  int64_t bytes() const { return bytes_; }
  int device() const { return device_; }

  // The message that shares the memory, without its token, and the descriptor to send with it, or a
  // negative number.
  const AttachMessage& message() const { return message_; }
  int descriptor() const { return descriptor_.get(); }

  // These block. Require that the `on_device` bytes lie in this memory.
  absl::Status CopyToHost(void* host, const uint8_t* on_device, int64_t bytes) const;
  absl::Status CopyFromHost(uint8_t* on_device, const void* host, int64_t bytes) const;

 private:
  explicit CudaMemory(const CudaDriver* driver) : driver_(*driver) {}
  absl::Status UseDevice(int device);
  absl::Status Create(int64_t bytes);
  absl::Status AdoptVmm(cuda::Allocation allocation);
  absl::Status AdoptLinear();
  absl::Status CheckInside(uint64_t base, uint64_t allocation_bytes);
  absl::Status Export(cuda::Allocation allocation);

  const CudaDriver& driver_;
  int device_ = -1;
  cuda::Context context_ = nullptr;
  uint8_t* data_ = nullptr;
  int64_t bytes_ = 0;
  AttachMessage message_;
  ScopedDescriptor descriptor_;
  // The allocation that this object made; 0: none.
  cuda::Allocation allocation_ = 0;
  cuda::Pointer reserved_ = 0;
  bool is_mapped_ = false;
  cuda::Pointer linear_ = 0;  // the memory that this object allocated; 0: none
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_MEMORY_CUDA_MEMORY_H_
