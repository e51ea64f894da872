// Decode, head dims up to 64: tiles of 128 keys, six stages.
#include "worker/kernels/cuda/paged/sm90/decode_kernels.cuh"

namespace ringattn::worker::cuda::paged {
RINGATTN_PAGED_DECODE(d64, 64, 128, 6)
}  // namespace ringattn::worker::cuda::paged
