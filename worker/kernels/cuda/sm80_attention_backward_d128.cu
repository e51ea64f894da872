// head_dim up to 128: 64 q rows x 128 keys, warp tiles 32 x 64 (S, dQ), 64 x 64 (dK, dV).
#include "worker/kernels/cuda/sm80_backward_kernels.cuh"

namespace ringattn::worker::cuda {
RINGATTN_SM80_BACKWARD(d128, 128, 64, 128, 2, 2, 2, 1, 0, true)
}  // namespace ringattn::worker::cuda
