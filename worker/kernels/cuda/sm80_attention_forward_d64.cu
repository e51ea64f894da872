// head_dim up to 64: 128 x 96 tiles, 4 warps of 32 rows, q in registers.
#include "worker/kernels/cuda/sm80_attention_forward.cuh"
#include "worker/kernels/cuda/sm80_forward_kernels.cuh"

namespace ringattn::worker::cuda {
RINGATTN_SM80_FORWARD(d64, 128, 2, Sm80Forward, 64, 128, 96, 4)
}  // namespace ringattn::worker::cuda
