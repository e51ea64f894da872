// Head dims up to 64: tiles of 64 keys in fp32, of 128 in bf16 and fp16.
#include "worker/kernels/cuda/paged/portable/attention.cuh"

namespace ringattn::worker::cuda::paged {
RINGATTN_PAGED_PORTABLE(64, 64, 128)
}  // namespace ringattn::worker::cuda::paged
