// Decode, head dims up to 192: tiles of 64 keys, four stages.
#include "worker/kernels/cuda/paged/sm90/decode_kernels.cuh"

namespace ringattn::worker::cuda::paged {
RINGATTN_PAGED_DECODE(d192, 192, 64, 4)
}  // namespace ringattn::worker::cuda::paged
