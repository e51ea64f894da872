// CudaImports: maps memory that clients have allocated on this machine's GPUs, and copies from and
// to it on one stream per direction.
#ifndef RINGATTN_WORKER_DEVICE_CUDA_CUDA_IMPORTS_H_
#define RINGATTN_WORKER_DEVICE_CUDA_CUDA_IMPORTS_H_

#include <cuda_runtime_api.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "worker/device/cuda/cuda_driver.h"
#include "worker/device/cuda/cuda_event.h"
#include "worker/device/imported_memory.h"

namespace ringattn::worker {

// Thread safe. Must outlive what it has imported.
class CudaImports {
 public:
  // Returns FAILED_PRECONDITION if the driver lacks a required call.
  static absl::StatusOr<std::unique_ptr<CudaImports>> Create(CudaEventPool* events);
  ~CudaImports();
  CudaImports(const CudaImports&) = delete;
  CudaImports& operator=(const CudaImports&) = delete;

  // See Device::ImportMemory and Device::CopyImported.
  absl::StatusOr<std::unique_ptr<ImportedMemory>> Import(const SharedAllocation& allocation);
  absl::StatusOr<EventRef> Copy(absl::Span<const DeviceCopy> pieces, ImportedCopy direction);

 private:
  CudaImports(CudaEventPool* events, const CudaDriver* driver)
      : events_(events), driver_(*driver) {}
  // Returns the GPU's index in this process. Returns FAILED_PRECONDITION unless it is this device
  // or one with peer access.
  absl::StatusOr<int> FindReachable(const std::string& uuid) const;
  absl::StatusOr<std::unique_ptr<ImportedMemory>> ImportVmm(const SharedAllocation& allocation,
                                                            int gpu);
  absl::StatusOr<std::unique_ptr<ImportedMemory>> ImportIpc(const SharedAllocation& allocation);

  CudaEventPool* const events_;
  const CudaDriver& driver_;
  // A copy and its two events are enqueued under one lock, so that they time only that copy.
  absl::Mutex in_mutex_, out_mutex_;
  cudaStream_t in_ = nullptr, out_ = nullptr;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_CUDA_CUDA_IMPORTS_H_
