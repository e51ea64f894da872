// head_dim up to 128: 64 q rows x 128 keys, warp tiles 32 x 32 (S, dQ), 32 x 64 (dK, dV).
#include "worker/kernels/cuda/sm80_backward_kernels.cuh"

namespace ringattn::cuda {
RINGATTN_SM80_BACKWARD(d128, 128, 64, 128, 2, 4, 2)
}  // namespace ringattn::cuda
