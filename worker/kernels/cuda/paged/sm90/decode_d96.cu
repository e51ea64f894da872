// Decode, head dims up to 96: tiles of 128 keys, three stages.
#include "worker/kernels/cuda/paged/sm90/decode_kernels.cuh"

namespace ringattn::worker::cuda::paged {
RINGATTN_PAGED_DECODE(d96, 96, 128, 3)
}  // namespace ringattn::worker::cuda::paged
