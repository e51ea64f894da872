// Kernels of one head-dim class of the forward: entry points for both tensor-core
// dtypes, and the TileKernel by which the launcher finds them.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_KERNELS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_KERNELS_CUH_

#include "worker/kernels/cuda/sm80_kernels.h"

// Within namespace ringattn::worker::cuda. `name` is the class (d96); `Kernel` is Sm80Forward or
// Sm80ForwardWide, and what follows are its numbers.
#define RINGATTN_SM80_FORWARD(name, threads, blocks_per_sm, Kernel, ...)                 \
  __global__ void __launch_bounds__(threads, blocks_per_sm)                              \
      sm80_bf16_attention_forward_##name(const __grid_constant__ ForwardParams params) { \
    extern __shared__ __align__(1024) char shared[];                                     \
    Kernel<__nv_bfloat16, __VA_ARGS__>::Run(params, shared);                             \
  }                                                                                      \
  __global__ void __launch_bounds__(threads, blocks_per_sm)                              \
      sm80_fp16_attention_forward_##name(const __grid_constant__ ForwardParams params) { \
    extern __shared__ __align__(1024) char shared[];                                     \
    Kernel<__half, __VA_ARGS__>::Run(params, shared);                                    \
  }                                                                                      \
  TileKernel Sm80ForwardKernel_##name() {                                                \
    using Half = Kernel<__half, __VA_ARGS__>;                                            \
    static_assert(Half::kThreads == threads);                                            \
    return {reinterpret_cast<const void*>(&sm80_bf16_attention_forward_##name),          \
            reinterpret_cast<const void*>(&sm80_fp16_attention_forward_##name),          \
            nullptr,                                                                     \
            Half::kTileRows,                                                             \
            Half::kTileKeys,                                                             \
            threads,                                                                     \
            Half::kSharedBytes};                                                         \
  }

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_KERNELS_CUH_
