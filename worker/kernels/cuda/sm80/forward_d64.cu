// head_dim up to 64: 128 x 96 tiles, 4 warps of 32 rows, q in registers.
#include "worker/kernels/cuda/sm80/forward.cuh"
#include "worker/kernels/cuda/sm80/kernels.cuh"
#include "worker/kernels/cuda/sm80/kernels.h"

namespace ringattn::worker::cuda::sm80 {

template <typename T>
using Kernel = Forward<ForwardShape<T, 64, 128, 96, 4>>;

TileKernel ForwardKernel_d64() {
  return KernelOf<Kernel<__nv_bfloat16>, Kernel<__half>, ForwardParams>();
}

}  // namespace ringattn::worker::cuda::sm80
