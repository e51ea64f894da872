// head_dim up to 256: tiles of 64 q rows by 128 keys, by two blocks.
#include "worker/kernels/cuda/sm90/paired_backward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
RINGATTN_SM90_PAIRED_BACKWARD(d256, 256, false)
}  // namespace ringattn::worker::cuda::sm90
