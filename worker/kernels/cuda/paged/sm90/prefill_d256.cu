// Prefill, head dims up to 256: 128 x 80 tiles, two consumer warpgroups.
#include "worker/kernels/cuda/paged/sm90/prefill_kernels.cuh"

namespace ringattn::worker::cuda::paged {
RINGATTN_PAGED_PREFILL(d256, 384, 256, 128, 80)
}  // namespace ringattn::worker::cuda::paged
