// The GPU part of backend.cc, in programs that are built with CUDA.
#ifndef RINGATTN_WORKER_CUDA_BACKEND_H_
#define RINGATTN_WORKER_CUDA_BACKEND_H_

#include "absl/status/statusor.h"
#include "worker/backend.h"

namespace ringattn::worker {

// Returns how many GPUs this process can use, or why it can use none.
absl::StatusOr<int> CountCudaDevices();

absl::StatusOr<Backend> MakeCudaBackend(const BackendOptions& options, int cuda_index);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_CUDA_BACKEND_H_
