// The kernels with score terms by head-dim class. Tiles are 32 x 32, or 16 x 16 where tiles of 32
// rows would not fit every device: in the gradients of head_dim 256 and in the widest class, whose
// gradients hold two tiles at a time (terms_backward.cuh).
#include "worker/kernels/cuda/simt/head_dim_classes.h"
#include "worker/kernels/cuda/simt/terms_backward.cuh"
#include "worker/kernels/cuda/simt/terms_forward.cuh"
#include "worker/kernels/cuda/simt/terms_kernels.h"

namespace ringattn::worker::cuda::simt {
namespace {

template <typename Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kMinBlocks)
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

template <int kDim, int kTile, int kGradientTile, bool kInTurn>
TermKernels KernelsOf() {
  return {KernelOf<TermForward<kDim, kTile>>(),
          KernelOf<TermKeyGradient<kDim, kGradientTile, kInTurn>>(),
          KernelOf<TermQueryGradient<kDim, kGradientTile, kInTurn>>(),
          KernelOf<TermBiasGradient<kDim, kTile>>()};
}

}  // namespace

TermKernels TermKernelsOf(int head_dim_class) {
  switch (head_dim_class) {
    case 64:
      return KernelsOf<64, 32, 32, false>();
    case 128:
      return KernelsOf<128, 32, 32, false>();
    case 256:
      return KernelsOf<256, 32, 16, false>();
    default:
      return KernelsOf<kWidestClass, 16, 16, true>();
  }
}

}  // namespace ringattn::worker::cuda::simt
