// head_dim up to 96: 64 q rows x 128 keys, warp tiles 32 x 64 (S), 64 x 48 (dK, dV), 32 x 48 (dQ).
#include "worker/kernels/cuda/sm80/backward.cuh"
#include "worker/kernels/cuda/sm80/kernels.cuh"
#include "worker/kernels/cuda/sm80/kernels.h"

namespace ringattn::worker::cuda::sm80 {

template <typename T>
using Kernel = Backward<BackwardShape<T, 96, 64, 128, 2, 2, 2, 1, 0, false>>;

TileKernel BackwardKernel_d96() {
  TileKernel kernel = KernelOf<Kernel<__nv_bfloat16>, Kernel<__half>, BackwardParams>();
  kernel.shared_bytes_sm90 = Kernel<__half>::Shape::kSharedBytesSm90;
  return kernel;
}

}  // namespace ringattn::worker::cuda::sm80
