// Converts CUDA runtime errors to statuses.
#ifndef RINGATTN_WORKER_DEVICE_CUDA_CUDA_STATUS_H_
#define RINGATTN_WORKER_DEVICE_CUDA_CUDA_STATUS_H_

#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace ringattn::worker {

// Returns INTERNAL with `call`, the name of the failed call, followed by CUDA's text. Clears the
// thread's last error, so that it does not appear at the next launch.
inline absl::Status CudaStatus(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return absl::OkStatus();
  (void)cudaGetLastError();
  return absl::InternalError(
      absl::StrCat(call, ": ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")"));
}

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_CUDA_CUDA_STATUS_H_
