// Launching kernels and making CUDA's errors statuses.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_LAUNCH_H_
#define RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "worker/kernels/cuda/launch/family.h"
#include "worker/kernels/cuda/plan/tile_kernel.h"

namespace ringattn::worker::cuda {

// INTERNAL with CUDA's text.
absl::Status ToStatus(cudaError_t error, const char* what);

// Appends the kernel's entries, in every dtype that it has.
void AddEntries(const TileKernel& kernel, std::vector<KernelEntry>& entries);

// Loads a kernel onto the current device and allows it its shared memory there.
absl::Status LoadKernel(const KernelEntry& entry);

// Enqueues `kernel` on a grid [tiles, heads, batch]; `params` is what its entry takes.
// Asynchronous. REQUIRES: the kernel was loaded; heads and batch <= 65535.
absl::Status LaunchTiles(const TileKernel& kernel, DType dtype, int64_t tiles, int64_t heads,
                         int64_t batch, const void* params, cudaStream_t stream);

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_LAUNCH_H_
