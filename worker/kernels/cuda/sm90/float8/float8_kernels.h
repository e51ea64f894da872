// The kernels of a forward in e4m3.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FLOAT8_FLOAT8_KERNELS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FLOAT8_FLOAT8_KERNELS_H_

#include <cuda_runtime_api.h>

#include <vector>

#include "common/attention/dtype.h"
#include "worker/kernels/cuda/sm90/float8/float8_forward_params.h"

namespace ringattn::worker::cuda::sm90 {

// Kernels for head dims up to 64 and 128; their results are bf16 or fp16. Their parameters are
// Float8ForwardParams.
ForwardKernel Float8ForwardKernel_d64();
ForwardKernel Float8ForwardKernel_d128();

// Computes the largest magnitudes, then rounds. `largest` must be 0 before. Asynchronous.
cudaError_t LaunchFloat8Rounding(DType dtype, const Float8RoundingParams& params, int32_t tiles,
                                 cudaStream_t stream);
std::vector<const void*> Float8RoundingEntries();

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_FLOAT8_FLOAT8_KERNELS_H_
