// head_dim up to 64: tiles of 128 q rows by 128 keys.
#include "worker/kernels/cuda/sm90/backward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
RINGATTN_SM90_BACKWARD(d64, 64, 128, false)
}  // namespace ringattn::worker::cuda::sm90
