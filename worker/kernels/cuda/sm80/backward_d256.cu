// head_dim up to 256: 64 q rows x 64 keys, warp tiles 32 x 32 (S, and dQ in four
// passes), 32 x 128 (dK, dV).
#include "worker/kernels/cuda/sm80/backward.cuh"
#include "worker/kernels/cuda/sm80/kernels.cuh"
#include "worker/kernels/cuda/sm80/kernels.h"

namespace ringattn::worker::cuda::sm80 {

template <typename T>
using Kernel = Backward<BackwardShape<T, 256, 64, 64, 2, 2, 2, 4, 0, false>>;

TileKernel BackwardKernel_d256() {
  TileKernel kernel = KernelOf<Kernel<__nv_bfloat16>, Kernel<__half>, BackwardParams>();
  kernel.shared_bytes_sm90 = Kernel<__half>::Shape::kSharedBytesSm90;
  return kernel;
}

}  // namespace ringattn::worker::cuda::sm80
