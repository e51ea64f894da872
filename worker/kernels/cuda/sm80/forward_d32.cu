// head_dim up to 32: 128 x 64 tiles, 4 warps of 32 rows, q in registers.
#include "worker/kernels/cuda/sm80/forward.cuh"
#include "worker/kernels/cuda/sm80/kernels.cuh"
#include "worker/kernels/cuda/sm80/kernels.h"

namespace ringattn::worker::cuda::sm80 {

template <typename T>
using Kernel = Forward<ForwardShape<T, 32, 128, 64, 4>>;

TileKernel ForwardKernel_d32() {
  return KernelOf<Kernel<__nv_bfloat16>, Kernel<__half>, ForwardParams>();
}

}  // namespace ringattn::worker::cuda::sm80
