// head_dim up to 128: tiles of 64 q rows by 128 keys.
#include "worker/kernels/cuda/sm90/backward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
RINGATTN_SM90_BACKWARD(d128, 128, 64, false)
}  // namespace ringattn::worker::cuda::sm90
