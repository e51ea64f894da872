// Head dims up to 128: tiles of 64 keys.
#include "worker/kernels/cuda/paged/portable/attention.cuh"

namespace ringattn::worker::cuda::paged {
RINGATTN_PAGED_PORTABLE(128, 64, 64)
}  // namespace ringattn::worker::cuda::paged
