// CudaImports: memory that clients have allocated on this machine's GPUs, mapped for one device,
// and that device's copies from and to it, on a stream of its own each way.
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

// Thread safe. Outlives what it has imported.
class CudaImports {
 public:
  // FAILED_PRECONDITION without what it needs of the driver.
  static absl::StatusOr<std::unique_ptr<CudaImports>> Create(CudaEventPool* events);
  ~CudaImports();
  CudaImports(const CudaImports&) = delete;
  CudaImports& operator=(const CudaImports&) = delete;

  // As Device::ImportMemory and Device::CopyImported.
  absl::StatusOr<std::unique_ptr<ImportedMemory>> Import(const SharedAllocation& allocation);
  absl::StatusOr<EventRef> Copy(absl::Span<const DeviceCopy> pieces, ImportedCopy direction);

 private:
  CudaImports(CudaEventPool* events, const CudaDriver* driver)
      : events_(events), driver_(*driver) {}
  // This process's number for the GPU. FAILED_PRECONDITION unless it is this device or one that it
  // reaches.
  absl::StatusOr<int> FindReachable(const std::string& uuid) const;
  absl::StatusOr<std::unique_ptr<ImportedMemory>> ImportVmm(const SharedAllocation& allocation,
                                                            int gpu);
  absl::StatusOr<std::unique_ptr<ImportedMemory>> ImportIpc(const SharedAllocation& allocation);

  CudaEventPool* const events_;
  const CudaDriver& driver_;
  // A copy and its two events are enqueued together, so that its times are its own.
  absl::Mutex in_mutex_, out_mutex_;
  cudaStream_t in_ = nullptr, out_ = nullptr;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_CUDA_CUDA_IMPORTS_H_
