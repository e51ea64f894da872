// Kernels of the bench: random inputs, pauses, and one contiguous Forward to compare a prefill
// with.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PAGED_CHECK_BENCH_KERNELS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PAGED_CHECK_BENCH_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "worker/kernels/cuda/sm90/forward/forward_params.h"

namespace ringattn::worker::cuda::paged::check {

// Fills device memory with bf16 numbers from a bell-shaped distribution of variance 1.
cudaError_t FillRandom(void* target, int64_t elements, uint64_t seed, cudaStream_t stream);

// Occupies the stream, and one thread of the device, for `nanoseconds`.
cudaError_t Pause(uint64_t nanoseconds, cudaStream_t stream);

// The Hopper family's forward for head dims up to 128 and long key ranges, as it is; takes
// ForwardKernelParams.
cuda::sm90::ForwardKernel ContiguousForward();

}  // namespace ringattn::worker::cuda::paged::check

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PAGED_CHECK_BENCH_KERNELS_H_
