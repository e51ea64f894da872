// Prefill, head dims up to 192: 128 x 96 tiles, two consumer warpgroups.
#include "worker/kernels/cuda/paged/sm90/prefill_kernels.cuh"

namespace ringattn::worker::cuda::paged {
RINGATTN_PAGED_PREFILL(d192, 384, 192, 128, 96)
}  // namespace ringattn::worker::cuda::paged
