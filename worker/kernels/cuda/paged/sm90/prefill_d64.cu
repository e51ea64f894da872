// Prefill, head dims up to 64: 192 x 128 tiles, three consumer warpgroups.
#include "worker/kernels/cuda/paged/sm90/prefill_kernels.cuh"

namespace ringattn::worker::cuda::paged {
RINGATTN_PAGED_PREFILL(d64, 512, 64, 192, 128)
}  // namespace ringattn::worker::cuda::paged
