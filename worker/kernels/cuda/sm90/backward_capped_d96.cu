// head_dim up to 96 with a softcap.
#include "worker/kernels/cuda/sm90/backward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
RINGATTN_SM90_BACKWARD(capped_d96, 96, 64, true)
}  // namespace ringattn::worker::cuda::sm90
