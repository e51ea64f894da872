// The gradient of a bias, head_dim up to 64.
#include "worker/kernels/cuda/sm90/bias_gradient_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
RINGATTN_SM90_BIAS_GRADIENT(d64, 64)
}  // namespace ringattn::worker::cuda::sm90
