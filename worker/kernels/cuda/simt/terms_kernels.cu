// The kernels with score terms by head-dim class. Tiles are 32 x 32, and 16 x 16 for the gradients
// of head_dim 256, whose tiles of 32 rows would not fit every device.
#include "worker/kernels/cuda/simt/terms_backward.cuh"
#include "worker/kernels/cuda/simt/terms_forward.cuh"
#include "worker/kernels/cuda/simt/terms_kernels.h"

namespace ringattn::worker::cuda::simt {
namespace {

template <typename Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 2)
    simt_with_terms(const __grid_constant__ typename Kernel::Params params) {
  extern __shared__ __align__(1024) char shared[];
  Kernel::Run(params, shared);
}

template <typename Kernel>
TileKernel KernelOf() {
  TileKernel kernel;
  kernel.fp32 = kernel.bf16 = kernel.fp16 = reinterpret_cast<const void*>(&simt_with_terms<Kernel>);
  kernel.tile_rows = kernel.tile_keys = Kernel::kTileRows;
  kernel.threads = Kernel::kThreads;
  kernel.shared_bytes = Kernel::kSharedBytes;
  return kernel;
}

template <int kDim, int kGradientTile>
TermKernels KernelsOf() {
  return {KernelOf<TermForward<kDim, 32>>(), KernelOf<TermKeyGradient<kDim, kGradientTile>>(),
          KernelOf<TermQueryGradient<kDim, kGradientTile>>(),
          KernelOf<TermBiasGradient<kDim, 32>>()};
}

}  // namespace

TermKernels TermKernelsOf(int head_dim_class) {
  switch (head_dim_class) {
    case 64:
      return KernelsOf<64, 32>();
    case 128:
      return KernelsOf<128, 32>();
    default:
      return KernelsOf<256, 16>();
  }
}

}  // namespace ringattn::worker::cuda::simt
