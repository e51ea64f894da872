// Entry points of one head-dim class: both dtypes, and the ForwardKernel by which the launcher
// finds them.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_FORWARD_KERNELS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_FORWARD_KERNELS_CUH_

#include "worker/kernels/cuda/primitives/shared_tile.cuh"
#include "worker/kernels/cuda/sm90/forward/forward_consumer.cuh"
#include "worker/kernels/cuda/sm90/forward/forward_kernels.h"
#include "worker/kernels/cuda/sm90/forward/forward_producer.cuh"
#include "worker/kernels/cuda/sm90/forward/forward_shape.cuh"

namespace ringattn::worker::cuda::sm90 {

// Ends with the block's barrier.
template <typename Shape>
__device__ __forceinline__ void InitForwardBarriers(const ForwardKernelParams& params,
                                                    uint32_t shared) {
  if (threadIdx.x == 0) {
    PrefetchMap(&params.q_map);
    InitBarrier(shared + Shape::kQFull, 1);
    InitBarrier(shared + Shape::kQEmpty, ArrivalsOf(32) * Shape::kConsumerWarps);
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      InitBarrier(shared + Shape::kKFull + 8 * stage, 1);
      InitBarrier(shared + Shape::kKEmpty + 8 * stage, ArrivalsOf(32) * Shape::kConsumerWarps);
      InitBarrier(shared + Shape::kVFull + 8 * stage, 1);
      InitBarrier(shared + Shape::kVEmpty + 8 * stage, ArrivalsOf(32) * Shape::kConsumerWarps);
    }
    FenceBarrierInit();
  }
  __syncthreads();
}

template <typename Shape>
__device__ __forceinline__ void RunForward(const ForwardKernelParams& params, char* memory) {
  const uint32_t shared = SharedAddress(memory);
  InitForwardBarriers<Shape>(params, shared);
  const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    GiveRegisters<Shape::kProducerRegisters>();
    if (__shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0) == 0) {
      ForwardProducer<Shape>::Run(params, memory, shared);
    }
  } else {
    TakeRegisters<Shape::kConsumerRegisters>();
    ForwardConsumer<Shape>::Run(params, memory, shared, warpgroup - 1);
  }
}

}  // namespace ringattn::worker::cuda::sm90

// Use within namespace ringattn::worker::cuda::sm90. `name` is the kernel's (d128); the numbers of
// ForwardShape follow.
#define RINGATTN_SM90_FORWARD(name, threads, ...)                                              \
  __global__ void __launch_bounds__(threads, 1)                                                \
      sm90_bf16_attention_forward_##name(const __grid_constant__ ForwardKernelParams params) { \
    extern __shared__ __align__(1024) char shared[];                                           \
    RunForward<ForwardShape<__nv_bfloat16, __VA_ARGS__>>(params, shared);                      \
  }                                                                                            \
  __global__ void __launch_bounds__(threads, 1)                                                \
      sm90_fp16_attention_forward_##name(const __grid_constant__ ForwardKernelParams params) { \
    extern __shared__ __align__(1024) char shared[];                                           \
    RunForward<ForwardShape<__half, __VA_ARGS__>>(params, shared);                             \
  }                                                                                            \
  ForwardKernel ForwardKernel_##name() {                                                       \
    using Half = ForwardShape<__half, __VA_ARGS__>;                                            \
    static_assert(Half::kThreads == threads);                                                  \
    return {reinterpret_cast<const void*>(&sm90_bf16_attention_forward_##name),                \
            reinterpret_cast<const void*>(&sm90_fp16_attention_forward_##name),                \
            Half::kRows,                                                                       \
            Half::kKeys,                                                                       \
            Half::kPanels,                                                                     \
            threads,                                                                           \
            Half::kSharedBytes};                                                               \
  }

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_FORWARD_KERNELS_CUH_
