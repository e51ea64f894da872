// head_dim up to 256: 64 q rows x 64 keys, warp tiles 32 x 32 (S, and dQ in four
// passes), 32 x 128 (dK, dV).
#include "worker/kernels/cuda/sm80_backward_kernels.cuh"

namespace ringattn::worker::cuda {
RINGATTN_SM80_BACKWARD(d256, 256, 64, 64, 2, 2, 2, 4, 0, false)
}  // namespace ringattn::worker::cuda
