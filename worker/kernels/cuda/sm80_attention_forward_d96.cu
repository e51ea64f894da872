// head_dim up to 96: 128 x 64 tiles, 4 warps of 32 rows, two blocks per SM.
#include "worker/kernels/cuda/sm80_attention_forward.cuh"
#include "worker/kernels/cuda/sm80_forward_kernels.cuh"

namespace ringattn::worker::cuda {
RINGATTN_SM80_FORWARD(d96, 128, 2, Sm80Forward, 96, 128, 64, 4)
}  // namespace ringattn::worker::cuda
