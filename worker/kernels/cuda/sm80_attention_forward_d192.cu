// head_dim up to 192: 128 x 64 tiles, 8 warps of 16 rows (the output
// accumulator of 32 rows would not fit), one block per SM.
#include "worker/kernels/cuda/sm80_attention_forward.cuh"
#include "worker/kernels/cuda/sm80_kernels.h"

namespace ringattn::cuda {
RINGATTN_SM80_FORWARD(d192, 192, 128, 64, 8, 1)
}  // namespace ringattn::cuda
