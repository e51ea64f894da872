// head_dim up to 128, long key ranges: 128 x 176 tiles, two consumer warpgroups. Larger tiles
// read q from shared memory less often, and waste more at a range's end.
#include "worker/kernels/cuda/sm90/forward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
RINGATTN_SM90_FORWARD(d128_long, 384, 128, 128, 176, true)
}  // namespace ringattn::worker::cuda::sm90
