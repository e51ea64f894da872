// head_dim up to 128: 128 x 128 tiles, two consumer warpgroups.
#include "worker/kernels/cuda/sm90/forward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
RINGATTN_SM90_FORWARD(d128, 384, 128, 128, 128, true)
}  // namespace ringattn::worker::cuda::sm90
