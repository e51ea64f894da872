// head_dim up to 32: 128 q rows x 128 keys, warp tiles 64 x 64 (S), 32 x 32 (dK, dV, dQ).
#include "worker/kernels/cuda/sm80_backward_kernels.cuh"

namespace ringattn::worker::cuda {
RINGATTN_SM80_BACKWARD(d32, 32, 128, 128, 2, 4, 4, 1, 0, false)
}  // namespace ringattn::worker::cuda
