// Head dims up to 256: tiles of 32 keys in fp32, of 64 in bf16 and fp16.
#include "worker/kernels/cuda/paged/portable/attention.cuh"

namespace ringattn::worker::cuda::paged {
RINGATTN_PAGED_PORTABLE(256, 32, 64)
}  // namespace ringattn::worker::cuda::paged
