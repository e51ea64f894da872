// head_dim up to 96: 64 q rows x 128 keys, warp tiles 32 x 64 (S), 64 x 48 (dK, dV), 32 x 48 (dQ).
#include "worker/kernels/cuda/sm80_backward_kernels.cuh"

namespace ringattn::worker::cuda {
RINGATTN_SM80_BACKWARD(d96, 96, 64, 128, 2, 2, 2, 1, 0, false)
}  // namespace ringattn::worker::cuda
