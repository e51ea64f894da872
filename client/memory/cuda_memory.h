// CudaMemory: memory on a GPU that this process can show to others: its own, or the caller's.
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

// Thread safe, but for what is done with the memory itself.
class CudaMemory {
 public:
  // Uninitialised, of cuMemCreate, so that any process may map it; rounded up to the GPU's pages
  // (2 MiB). Errors: FAILED_PRECONDITION without a driver; INVALID_ARGUMENT if there is no such
  // device, or for 0 bytes; RESOURCE_EXHAUSTED without memory.
  static absl::StatusOr<std::shared_ptr<const CudaMemory>> Allocate(int device, int64_t bytes);
  // The same as cudaMalloc has it, for comparison: shown by CUDA's legacy handle.
  static absl::StatusOr<std::shared_ptr<const CudaMemory>> AllocateLinear(int device,
                                                                          int64_t bytes);
  // Of the caller, who keeps it. INVALID_ARGUMENT, saying why, for memory that no other process can
  // map.
  static absl::StatusOr<std::shared_ptr<const CudaMemory>> Adopt(void* data, int64_t bytes);
  // What it has allocated is unmapped here; where others have it mapped it stays in use.
  ~CudaMemory();

  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;

  uint8_t* data() const { return data_; }  // on the GPU
  int64_t bytes() const { return bytes_; }
  int device() const { return device_; }

  // How it is shown: the message without its token, and what goes with it; negative: nothing.
  const AttachMessage& message() const { return message_; }
  int descriptor() const { return descriptor_.get(); }

  // Blocking. REQUIRES: `on_device` bytes lie in it.
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
  // Of its own allocation; 0: none.
  cuda::Allocation allocation_ = 0;
  cuda::Pointer reserved_ = 0;
  bool is_mapped_ = false;
  cuda::Pointer linear_ = 0;  // likewise
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_MEMORY_CUDA_MEMORY_H_
