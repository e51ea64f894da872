// head_dim up to 64: 128 q rows x 128 keys, warp tiles 64 x 64 (S), 32 x 64 (dK, dV), 64 x 32 (dQ).
#include "worker/kernels/cuda/sm80_backward_kernels.cuh"

namespace ringattn::worker::cuda {
RINGATTN_SM80_BACKWARD(d64, 64, 128, 128, 2, 4, 2, 1, 0, false)
}  // namespace ringattn::worker::cuda
