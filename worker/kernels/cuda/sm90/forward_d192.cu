// head_dim up to 192: 128 x 112 tiles, two consumer warpgroups.
#include "worker/kernels/cuda/sm90/forward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
RINGATTN_SM90_FORWARD(d192, 384, 192, 128, 112, true)
}  // namespace ringattn::worker::cuda::sm90
