// The gradient of a bias, head_dim up to 128.
#include "worker/kernels/cuda/sm90/bias_gradient_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
RINGATTN_SM90_BIAS_GRADIENT(d128, 128)
}  // namespace ringattn::worker::cuda::sm90
