// head_dim up to 32: 128 x 64 tiles, 4 warps of 32 rows, q in registers.
#include "worker/kernels/cuda/sm80_attention_forward.cuh"
#include "worker/kernels/cuda/sm80_forward_kernels.cuh"

namespace ringattn::worker::cuda {
RINGATTN_SM80_FORWARD(d32, 128, 2, Sm80Forward, 32, 128, 64, 4)
}  // namespace ringattn::worker::cuda
