// The fp32 kernels by head-dim class (64, 128, 256), and the 16-bit ones, which have one class
// only. Tiles: 32 x 32, and 16 x 16 for the backward of head_dim 256, whose four fp32 tiles of
// 32 rows would not fit every device.
#include "worker/kernels/cuda/simt/kernels.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "worker/kernels/cuda/simt/attention.cuh"

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

// The class that has kernels for all dtypes.
template <template <typename, int, int> typename Kernel, int kTile, typename Params>
TileKernel WidestKernel() {
  TileKernel kernel = KernelOf<Kernel<float, 256, kTile>, Params>();
  kernel.bf16 = KernelOf<Kernel<__nv_bfloat16, 256, kTile>, Params>().fp32;
  kernel.fp16 = KernelOf<Kernel<__half, 256, kTile>, Params>().fp32;
  return kernel;
}

}  // namespace

TileKernel ForwardKernel(int head_dim_class) {
  switch (head_dim_class) {
    case 64:
      return KernelOf<Forward<float, 64, 32>, ForwardParams>();
    case 128:
      return KernelOf<Forward<float, 128, 32>, ForwardParams>();
    default:
      return WidestKernel<Forward, 32, ForwardParams>();
  }
}

TileKernel BackwardKernel(int head_dim_class) {
  switch (head_dim_class) {
    case 64:
      return KernelOf<Backward<float, 64, 32>, BackwardParams>();
    case 128:
      return KernelOf<Backward<float, 128, 32>, BackwardParams>();
    default:
      return WidestKernel<Backward, 16, BackwardParams>();
  }
}

}  // namespace ringattn::worker::cuda::simt
