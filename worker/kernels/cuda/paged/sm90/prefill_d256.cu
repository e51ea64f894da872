// Prefill, head dims up to 256: 128 x 64 tiles, two consumer warpgroups.
#include "worker/kernels/cuda/paged/sm90/prefill_kernels.cuh"

namespace ringattn::worker::cuda::paged {
RINGATTN_PAGED_PREFILL(d256, 384, 256, 128, 64)
}  // namespace ringattn::worker::cuda::paged
