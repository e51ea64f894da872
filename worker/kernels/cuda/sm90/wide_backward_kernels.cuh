// Entry points of one head-dim class of the wide backward; see backward_kernels.cuh.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_WIDE_BACKWARD_KERNELS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_WIDE_BACKWARD_KERNELS_CUH_

#include "worker/kernels/cuda/sm90/backward_kernels.cuh"
#include "worker/kernels/cuda/sm90/wide_backward_consumer.cuh"
#include "worker/kernels/cuda/sm90/wide_backward_producer.cuh"
#include "worker/kernels/cuda/sm90/wide_backward_shape.cuh"

namespace ringattn::worker::cuda::sm90 {

template <typename Shape>
__device__ __forceinline__ void RunWideBackward(const BackwardKernelParams& params, char* memory) {
  const uint32_t shared = SharedAddress(memory);
  if (threadIdx.x == 0) InitBackwardBarriers<Shape>(shared);
  // One answer for all: the groups would wait for each other for ever.
  if (__syncthreads_or(Stopped(params.common.stop_word))) return;
  const BackwardItem item(params);
  const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    GiveRegisters<Shape::kProducerRegisters>();
    WideBackwardProducer<Shape>{{params, memory, shared, item}}.Run(
        __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0));
  } else if (warpgroup == 1) {
    TakeRegisters<Shape::kConsumerRegisters>();
    WideBackwardConsumer<Shape>::template Run<0>(params, memory, shared, item);
  } else {
    TakeRegisters<Shape::kConsumerRegisters>();
    WideBackwardConsumer<Shape>::template Run<1>(params, memory, shared, item);
  }
}

}  // namespace ringattn::worker::cuda::sm90

// Within namespace ringattn::worker::cuda::sm90. `name` is the kernel's (d256); what follows are
// WideBackwardShape's numbers.
#define RINGATTN_SM90_WIDE_BACKWARD(name, ...)                                                   \
  __global__ void __launch_bounds__(384, 1)                                                      \
      sm90_bf16_attention_backward_##name(const __grid_constant__ BackwardKernelParams params) { \
    extern __shared__ __align__(1024) char shared[];                                             \
    RunWideBackward<WideBackwardShape<__nv_bfloat16, __VA_ARGS__>>(params, shared);              \
  }                                                                                              \
  __global__ void __launch_bounds__(384, 1)                                                      \
      sm90_fp16_attention_backward_##name(const __grid_constant__ BackwardKernelParams params) { \
    extern __shared__ __align__(1024) char shared[];                                             \
    RunWideBackward<WideBackwardShape<__half, __VA_ARGS__>>(params, shared);                     \
  }                                                                                              \
  BackwardKernel BackwardKernel_##name() {                                                       \
    using Half = WideBackwardShape<__half, __VA_ARGS__>;                                         \
    static_assert(Half::kThreads == 384);                                                        \
    return {reinterpret_cast<const void*>(&sm90_bf16_attention_backward_##name),                 \
            reinterpret_cast<const void*>(&sm90_fp16_attention_backward_##name),                 \
            Half::kRows,                                                                         \
            Half::kKeys,                                                                         \
            Half::kThreads,                                                                      \
            Half::kSharedBytes};                                                                 \
  }

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_WIDE_BACKWARD_KERNELS_CUH_
