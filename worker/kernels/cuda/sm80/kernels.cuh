// Entry points of the family's kernels, and the TileKernel by which the host finds one.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM80_KERNELS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM80_KERNELS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "worker/kernels/cuda/plan/attention_params.h"
#include "worker/kernels/cuda/plan/tile_kernel.h"

namespace ringattn::worker::cuda::sm80 {

// `Kernel` is a Forward, ForwardWide or Backward of one shape; `Params` are its parameters.
template <typename Kernel, typename Params>
__global__ void __launch_bounds__(Kernel::Shape::kThreads, Kernel::Shape::kBlocksPerSm)
    sm80_attention(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) char shared[];
  Kernel::Run(params, shared);
}

// The same kernel in both dtypes.
template <typename Bf16, typename Fp16, typename Params>
TileKernel KernelOf() {
  using Shape = typename Fp16::Shape;
  TileKernel kernel;
  kernel.bf16 = reinterpret_cast<const void*>(&sm80_attention<Bf16, Params>);
  kernel.fp16 = reinterpret_cast<const void*>(&sm80_attention<Fp16, Params>);
  kernel.tile_rows = Shape::kRows;
  kernel.tile_keys = Shape::kKeys;
  kernel.threads = Shape::kThreads;
  kernel.blocks_per_sm = Shape::kBlocksPerSm;
  kernel.shared_bytes = Shape::kSharedBytes;
  return kernel;
}

}  // namespace ringattn::worker::cuda::sm80

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM80_KERNELS_CUH_
