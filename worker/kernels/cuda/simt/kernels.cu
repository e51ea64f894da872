// The kernels by head-dim class, as kernels.h lists them. Tiles are 32 x 32, or 16 x 16 where the
// fp32 tiles of 32 rows would not fit every device: in the forward of the widest class (two tiles)
// and the backward of class 256 (four).
#include "worker/kernels/cuda/simt/kernels.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "worker/kernels/cuda/simt/attention.cuh"
#include "worker/kernels/cuda/simt/head_dim_classes.h"

namespace ringattn::worker::cuda::simt {
namespace {

template <typename Kernel, typename Params>
__global__ void __launch_bounds__(Kernel::kThreads)
    simt_attention(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) char shared[];
  Kernel::Run(params, shared);
}

template <typename Kernel, typename Params>
TileKernel KernelOf() {
  TileKernel kernel;
  kernel.fp32 = reinterpret_cast<const void*>(&simt_attention<Kernel, Params>);
  kernel.tile_rows = kernel.tile_keys = Kernel::kTileRows;
  kernel.threads = Kernel::kThreads;
  kernel.shared_bytes = Kernel::kSharedBytes;
  return kernel;
}

// A class that has kernels for all dtypes.
template <template <typename, int, int> typename Kernel, int kDim, int kTile, typename Params>
TileKernel KernelOfAllTypes() {
  TileKernel kernel = KernelOf<Kernel<float, kDim, kTile>, Params>();
  kernel.bf16 = KernelOf<Kernel<__nv_bfloat16, kDim, kTile>, Params>().fp32;
  kernel.fp16 = KernelOf<Kernel<__half, kDim, kTile>, Params>().fp32;
  return kernel;
}

}  // namespace

TileKernel ForwardKernel(int head_dim_class) {
  switch (head_dim_class) {
    case 64:
      return KernelOf<Forward<float, 64, 32>, ForwardParams>();
    case 128:
      return KernelOf<Forward<float, 128, 32>, ForwardParams>();
    case 256:
      return KernelOfAllTypes<Forward, 256, 32, ForwardParams>();
    default:
      return KernelOfAllTypes<Forward, kWidestClass, 16, ForwardParams>();
  }
}

TileKernel BackwardKernel(int head_dim_class) {
  switch (head_dim_class) {
    case 64:
      return KernelOf<Backward<float, 64, 32>, BackwardParams>();
    case 128:
      return KernelOf<Backward<float, 128, 32>, BackwardParams>();
    default:
      return KernelOfAllTypes<Backward, 256, 16, BackwardParams>();
  }
}

}  // namespace ringattn::worker::cuda::simt
