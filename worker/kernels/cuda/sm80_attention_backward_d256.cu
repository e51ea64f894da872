// head_dim up to 256: 64 q rows x 64 keys, warp tiles 16 x 32 (S), 32 x 64 (dK, dV, dQ).
#include "worker/kernels/cuda/sm80_backward_kernels.cuh"

namespace ringattn::cuda {
RINGATTN_SM80_BACKWARD(d256, 256, 64, 64, 4, 2, 2)
}  // namespace ringattn::cuda
