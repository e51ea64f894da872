// Decode, head dims up to 256: tiles of 64 keys, three stages.
#include "worker/kernels/cuda/paged/sm90/decode_kernels.cuh"

namespace ringattn::worker::cuda::paged {
RINGATTN_PAGED_DECODE(d256, 256, 64, 3)
}  // namespace ringattn::worker::cuda::paged
