// head_dim up to 192: 64 q rows x 96 keys, warp tiles 16 x 48 (S), 48 x 48 (dK, dV),
// 32 x 48 (dQ). (64 keys would leave room to stage dq, but were 8% slower.)
#include "worker/kernels/cuda/sm80_backward_kernels.cuh"

namespace ringattn::cuda {
RINGATTN_SM80_BACKWARD(d192, 192, 64, 96, 4, 2, 2)
}  // namespace ringattn::cuda
