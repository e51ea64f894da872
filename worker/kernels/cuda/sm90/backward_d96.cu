// head_dim up to 96: tiles of 64 q rows by 128 keys.
#include "worker/kernels/cuda/sm90/backward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
RINGATTN_SM90_BACKWARD(d96, 96, 64, false)
}  // namespace ringattn::worker::cuda::sm90
