// Prefill, head dims up to 96: 192 x 96 tiles, three consumer warpgroups.
#include "worker/kernels/cuda/paged/sm90/prefill_kernels.cuh"

namespace ringattn::worker::cuda::paged {
RINGATTN_PAGED_PREFILL(d96, 512, 96, 192, 96)
}  // namespace ringattn::worker::cuda::paged
