// Prefill, head dims up to 128: 128 x 128 tiles, two consumer warpgroups.
#include "worker/kernels/cuda/paged/sm90/prefill_kernels.cuh"

namespace ringattn::worker::cuda::paged {
RINGATTN_PAGED_PREFILL(d128, 384, 128, 128, 128)
}  // namespace ringattn::worker::cuda::paged
