// head_dim up to 256: 128 x 80 tiles, two consumer warpgroups.
#include "worker/kernels/cuda/sm90/forward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
RINGATTN_SM90_FORWARD(d256, 384, 256, 128, 80, true)
}  // namespace ringattn::worker::cuda::sm90
