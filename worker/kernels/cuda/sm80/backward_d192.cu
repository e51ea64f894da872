// head_dim up to 192: 64 q rows x 96 keys, warp tiles 32 x 48 (S), 96 x 48 (dK, dV), 32 x 32 (dQ in
// three passes, one by the values group).
#include "worker/kernels/cuda/sm80/backward.cuh"
#include "worker/kernels/cuda/sm80/kernels.cuh"
#include "worker/kernels/cuda/sm80/kernels.h"

namespace ringattn::worker::cuda::sm80 {

template <typename T>
using Kernel = Backward<BackwardShape<T, 192, 64, 96, 2, 1, 2, 3, 1, false>>;

TileKernel BackwardKernel_d192() {
  TileKernel kernel = KernelOf<Kernel<__nv_bfloat16>, Kernel<__half>, BackwardParams>();
  kernel.shared_bytes_sm90 = Kernel<__half>::Shape::kSharedBytesSm90;
  return kernel;
}

}  // namespace ringattn::worker::cuda::sm80
