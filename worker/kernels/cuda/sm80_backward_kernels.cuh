// Kernels of one head-dim class of the backward: entry points for both tensor-core
// dtypes, and the TileKernel by which the launcher finds them.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM80_BACKWARD_KERNELS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM80_BACKWARD_KERNELS_CUH_

#include "worker/kernels/cuda/sm80_attention_backward.cuh"
#include "worker/kernels/cuda/sm80_backward_shape.cuh"
#include "worker/kernels/cuda/sm80_kernels.h"

// Within namespace ringattn::worker::cuda. `name` is the class (d96); what follows keys are the
// other numbers of Sm80BackwardShape.
#define RINGATTN_SM80_BACKWARD(name, dim, rows, keys, ...)                                 \
  __global__ void __launch_bounds__(256, 1)                                                \
      sm80_bf16_attention_backward_##name(const __grid_constant__ BackwardParams params) { \
    extern __shared__ __align__(1024) char shared[];                                       \
    using Shape = Sm80BackwardShape<__nv_bfloat16, dim, rows, keys, __VA_ARGS__>;          \
    Sm80Backward<Shape>::Run(params, shared);                                              \
  }                                                                                        \
  __global__ void __launch_bounds__(256, 1)                                                \
      sm80_fp16_attention_backward_##name(const __grid_constant__ BackwardParams params) { \
    extern __shared__ __align__(1024) char shared[];                                       \
    using Shape = Sm80BackwardShape<__half, dim, rows, keys, __VA_ARGS__>;                 \
    Sm80Backward<Shape>::Run(params, shared);                                              \
  }                                                                                        \
  TileKernel Sm80BackwardKernel_##name() {                                                 \
    using Shape = Sm80BackwardShape<__half, dim, rows, keys, __VA_ARGS__>;                 \
    return {reinterpret_cast<const void*>(&sm80_bf16_attention_backward_##name),           \
            reinterpret_cast<const void*>(&sm80_fp16_attention_backward_##name),           \
            nullptr,                                                                       \
            rows,                                                                          \
            keys,                                                                          \
            Shape::kThreads,                                                               \
            Shape::kSharedBytes,                                                           \
            Shape::kSharedBytesSm90};                                                      \
  }

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM80_BACKWARD_KERNELS_CUH_
