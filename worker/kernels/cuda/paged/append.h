// The kernel that writes a step's new k and v into the blocks of the cache.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PAGED_APPEND_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PAGED_APPEND_H_

#include "worker/kernels/cuda/paged/step_params.h"

namespace ringattn::worker::cuda::paged {

inline constexpr int kAppendThreads = 256;

// Threads of the fetching kernel, which has one thread block.
inline constexpr int kFetchThreads = 1024;

// Grid [slices, max_rows]: the thread blocks of a row take its new tokens in turn. Takes
// AppendParams. `access_bytes`: 16, 4 or 2, of which all addresses and sizes are multiples.
const void* AppendKernel(int access_bytes);

// Copies the input from host memory, and then appends. One thread block: the new entries need no
// other way to see the input. Takes FetchParams.
const void* FetchKernel(int access_bytes);

}  // namespace ringattn::worker::cuda::paged

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PAGED_APPEND_H_
