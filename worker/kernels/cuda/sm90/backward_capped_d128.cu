// head_dim up to 128 with a softcap.
#include "worker/kernels/cuda/sm90/backward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
RINGATTN_SM90_BACKWARD(capped_d128, 128, 64, true)
}  // namespace ringattn::worker::cuda::sm90
