// head_dim up to 64: 192 x 128 tiles, three consumer warpgroups.
#include "worker/kernels/cuda/sm90/forward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
RINGATTN_SM90_FORWARD(d64, 512, 64, 192, 128, true)
}  // namespace ringattn::worker::cuda::sm90
