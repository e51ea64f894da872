// Entry points of a forward for few q rows and split keys. One consumer group of 64 rows halves the
// products and their power, and there are enough stages to keep memory busy.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_SPLIT_FORWARD_KERNELS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_SPLIT_FORWARD_KERNELS_CUH_

#include "worker/kernels/cuda/primitives/shared_tile.cuh"
#include "worker/kernels/cuda/sm90/forward/forward_consumer.cuh"
#include "worker/kernels/cuda/sm90/forward/forward_kernels.h"
#include "worker/kernels/cuda/sm90/forward/split_forward_producer.cuh"
#include "worker/kernels/cuda/sm90/forward/split_forward_products.cuh"

namespace ringattn::worker::cuda::sm90 {

template <typename Shape>
__device__ __forceinline__ void RunSplitForward(const SplitForwardParams& params, char* memory) {
  const uint32_t shared = SharedAddress(memory);
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp == 0) {
    // Loads are in flight while the barriers are initialised.
    const SplitItem item(params, blockIdx.x);
    if (threadIdx.x == 0) {
      PrefetchMap(&params.near_maps[0].k);
      PrefetchMap(&params.near_maps[0].v);
      PrefetchMap(&params.q_map);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      // The kernel may start while the preceding kernel runs; the latter's results are visible from
      // here on. All other threads wait for this lane before they touch memory. The tables are
      // older.
      asm volatile("griddepcontrol.wait;" ::: "memory");
      SplitForwardProducer<Shape>::Run(params, memory, shared, item);
    }
    return;
  }
  if (threadIdx.x == 32) {
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
  if (warp >= 4) {
    ForwardConsumer<Shape, SplitForwardProducts<Shape>>::Run(params, memory, shared, 0);
  }
}

}  // namespace ringattn::worker::cuda::sm90

// Use within namespace ringattn::worker::cuda::sm90. `name` is the kernel's (d128_split); the
// numbers of SplitForwardShape follow.
#define RINGATTN_SM90_SPLIT_FORWARD(name, ...)                                                \
  __global__ void __launch_bounds__(256, 1)                                                   \
      sm90_bf16_attention_forward_##name(const __grid_constant__ SplitForwardParams params) { \
    extern __shared__ __align__(1024) char shared[];                                          \
    RunSplitForward<SplitForwardShape<__nv_bfloat16, __VA_ARGS__>>(params, shared);           \
  }                                                                                           \
  __global__ void __launch_bounds__(256, 1)                                                   \
      sm90_fp16_attention_forward_##name(const __grid_constant__ SplitForwardParams params) { \
    extern __shared__ __align__(1024) char shared[];                                          \
    RunSplitForward<SplitForwardShape<__half, __VA_ARGS__>>(params, shared);                  \
  }                                                                                           \
  ForwardKernel ForwardKernel_##name() {                                                      \
    using Half = SplitForwardShape<__half, __VA_ARGS__>;                                      \
    static_assert(Half::kThreads == 256);                                                     \
    return {reinterpret_cast<const void*>(&sm90_bf16_attention_forward_##name),               \
            reinterpret_cast<const void*>(&sm90_fp16_attention_forward_##name),               \
            Half::kRows,                                                                      \
            Half::kKeys,                                                                      \
            Half::kPanels,                                                                    \
            Half::kThreads,                                                                   \
            Half::kSharedBytes};                                                              \
  }

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_SPLIT_FORWARD_KERNELS_CUH_
