// Entry points of a bias's gradient: both dtypes of one head-dim class. The grid is [items].
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_BIAS_GRADIENT_KERNELS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_BIAS_GRADIENT_KERNELS_CUH_

#include "worker/kernels/cuda/primitives/shared_tile.cuh"
#include "worker/kernels/cuda/primitives/thread.cuh"
#include "worker/kernels/cuda/sm90/terms/bias_gradient_consumer.cuh"
#include "worker/kernels/cuda/sm90/terms/bias_gradient_producer.cuh"

namespace ringattn::worker::cuda::sm90 {

template <typename Shape>
__device__ __forceinline__ void RunBiasGradient(const BiasGradientKernelParams& params,
                                                char* memory) {
  const uint32_t shared = SharedAddress(memory);
  const BiasGradientItem item(params);
  const BiasGradientProducer<Shape> producer{params, memory, shared, item,
                                             static_cast<int>(threadIdx.x) & 31};
  if (threadIdx.x == 0) {
    InitBarrier(shared + Shape::kQFull, 1);
    InitBarrier(shared + Shape::kQEmpty, ArrivalsOf(32) * Shape::kConsumerWarps);
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      InitBarrier(shared + Shape::kKFull + 8 * stage, 1);
      InitBarrier(shared + Shape::kVFull + 8 * stage, 1);
      InitBarrier(shared + Shape::kKvEmpty + 8 * stage, ArrivalsOf(32) * Shape::kConsumerWarps);
      InitBarrier(shared + Shape::kTileFull + 8 * stage, 32);
      InitBarrier(shared + Shape::kTileEmpty + 8 * stage, ArrivalsOf(32) * Shape::kConsumerWarps);
    }
    for (int i = 0; i < Shape::kGroups * Shape::kBiasStages; ++i) {
      InitBarrier(shared + Shape::kBiasFull + 8 * i, 1);
      InitBarrier(shared + Shape::kBiasEmpty + 8 * i, ArrivalsOf(32) * 4);  // a group's warps
    }
    FenceBarrierInit();
  }
  // All threads must get the same answer, because otherwise the groups would wait for each other
  // forever.
  if (__syncthreads_or(Stopped(params.forward.common.stop_word)) || !producer.Any()) return;
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp >= 4) {
    BiasGradientConsumer<Shape>::Run(params, memory, shared, item, warp / 4 - 1);
  } else if (warp == 0) {
    producer.Load();
  } else if (warp == 1) {
    producer.LoadBias();
  }
}

}  // namespace ringattn::worker::cuda::sm90

// Use within namespace ringattn::worker::cuda::sm90. `name` is the class (d128); the number of
// BiasGradientShape follows.
#define RINGATTN_SM90_BIAS_GRADIENT(name, ...)                                                  \
  __global__ void __launch_bounds__(384, 1)                                                     \
      sm90_bf16_bias_gradient_##name(const __grid_constant__ BiasGradientKernelParams params) { \
    extern __shared__ __align__(1024) char shared[];                                            \
    RunBiasGradient<BiasGradientShape<__nv_bfloat16, __VA_ARGS__>>(params, shared);             \
  }                                                                                             \
  __global__ void __launch_bounds__(384, 1)                                                     \
      sm90_fp16_bias_gradient_##name(const __grid_constant__ BiasGradientKernelParams params) { \
    extern __shared__ __align__(1024) char shared[];                                            \
    RunBiasGradient<BiasGradientShape<__half, __VA_ARGS__>>(params, shared);                    \
  }                                                                                             \
  ForwardKernel BiasGradientKernel_##name() {                                                   \
    using Half = BiasGradientShape<__half, __VA_ARGS__>;                                        \
    static_assert(Half::kThreads == 384);                                                       \
    return {reinterpret_cast<const void*>(&sm90_bf16_bias_gradient_##name),                     \
            reinterpret_cast<const void*>(&sm90_fp16_bias_gradient_##name),                     \
            Half::kRows,                                                                        \
            Half::kKeys,                                                                        \
            Half::kPanels,                                                                      \
            Half::kThreads,                                                                     \
            Half::kSharedBytes};                                                                \
  }

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_BIAS_GRADIENT_KERNELS_CUH_
