// head_dim up to 32: 128 q rows x 128 keys, warp tiles 64 x 64 (S), 32 x 32 (dK, dV, dQ).
#include "worker/kernels/cuda/sm80/backward.cuh"
#include "worker/kernels/cuda/sm80/kernels.cuh"
#include "worker/kernels/cuda/sm80/kernels.h"

namespace ringattn::worker::cuda::sm80 {

template <typename T>
using Kernel = Backward<BackwardShape<T, 32, 128, 128, 2, 4, 4, 1, 0, false>>;

TileKernel BackwardKernel_d32() {
  TileKernel kernel = KernelOf<Kernel<__nv_bfloat16>, Kernel<__half>, BackwardParams>();
  kernel.shared_bytes_sm90 = Kernel<__half>::Shape::kSharedBytesSm90;
  return kernel;
}

}  // namespace ringattn::worker::cuda::sm80
