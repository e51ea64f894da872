// head_dim up to 192: 128 x 64 tiles, 8 warps in pairs of 32 rows, one block per SM.
#include "worker/kernels/cuda/sm80/forward_wide.cuh"
#include "worker/kernels/cuda/sm80/kernels.cuh"
#include "worker/kernels/cuda/sm80/kernels.h"

namespace ringattn::worker::cuda::sm80 {

template <typename T>
using Kernel = ForwardWide<ForwardWideShape<T, 192, 128, 64, 4>>;

TileKernel ForwardKernel_d192() {
  return KernelOf<Kernel<__nv_bfloat16>, Kernel<__half>, ForwardParams>();
}

}  // namespace ringattn::worker::cuda::sm80
