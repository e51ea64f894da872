// head_dim up to 192: 128 x 64 tiles, 8 warps in pairs of 32 rows, one block per SM.
#include "worker/kernels/cuda/sm80_attention_forward_wide.cuh"
#include "worker/kernels/cuda/sm80_forward_kernels.cuh"

namespace ringattn::worker::cuda {
RINGATTN_SM80_FORWARD(d192, 256, 1, Sm80ForwardWide, 192, 128, 64, 4)
}  // namespace ringattn::worker::cuda
