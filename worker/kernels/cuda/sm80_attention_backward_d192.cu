// head_dim up to 192: 64 q rows x 96 keys, warp tiles 32 x 48 (S), 96 x 48 (dK, dV), 32 x 32 (dQ in
// three passes, one by the values group).
#include "worker/kernels/cuda/sm80_backward_kernels.cuh"

namespace ringattn::worker::cuda {
RINGATTN_SM80_BACKWARD(d192, 192, 64, 96, 2, 1, 2, 3, 1, false)
}  // namespace ringattn::worker::cuda
