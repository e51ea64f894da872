// Launches kernels and converts CUDA's errors to statuses.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_LAUNCH_H_
#define RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "worker/kernels/cuda/launch/family.h"
#include "worker/kernels/cuda/plan/tile_kernel.h"

namespace ringattn::worker::cuda {

// Returns INTERNAL with CUDA's text for an error.
absl::Status ToStatus(cudaError_t error, const char* what);

// Appends the kernel's entries, one per dtype that the kernel supports.
void AddEntries(const TileKernel& kernel, std::vector<KernelEntry>& entries);

// Loads a kernel onto the current device and sets its limit of dynamic shared memory there.
absl::Status LoadKernel(const KernelEntry& entry);

// Enqueues `kernel` on a grid [tiles, heads, batch]; `params` points to the entry's parameters.
// Asynchronous. REQUIRES: the kernel is loaded; heads and batch <= 65535.
absl::Status LaunchTiles(const TileKernel& kernel, DType dtype, int64_t tiles, int64_t heads,
                         int64_t batch, const void* params, cudaStream_t stream);

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_LAUNCH_H_
