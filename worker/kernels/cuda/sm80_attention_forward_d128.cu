// head_dim up to 128: 128 x 64 tiles, 4 warps of 32 rows, two blocks per SM.
#include "worker/kernels/cuda/sm80_attention_forward.cuh"
#include "worker/kernels/cuda/sm80_forward_kernels.cuh"

namespace ringattn::worker::cuda {
RINGATTN_SM80_FORWARD(d128, 128, 2, Sm80Forward, 128, 128, 64, 4)
}  // namespace ringattn::worker::cuda
