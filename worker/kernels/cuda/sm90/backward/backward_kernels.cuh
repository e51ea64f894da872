// Entry points of one head-dim class of the backward: both dtypes, and the BackwardKernel by which
// the launcher finds them. The grid is [items].
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_BACKWARD_KERNELS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_BACKWARD_KERNELS_CUH_

#include "worker/kernels/cuda/primitives/shared_tile.cuh"
#include "worker/kernels/cuda/primitives/thread.cuh"
#include "worker/kernels/cuda/sm90/backward/backward_consumer.cuh"
#include "worker/kernels/cuda/sm90/backward/backward_kernels.h"
#include "worker/kernels/cuda/sm90/backward/backward_producer.cuh"
#include "worker/kernels/cuda/sm90/backward/backward_shape.cuh"

namespace ringattn::worker::cuda::sm90 {

template <typename Shape>
__device__ __forceinline__ void InitBackwardBarriers(uint32_t shared) {
  InitBarrier(shared + Shape::kKFull, 1);
  InitBarrier(shared + Shape::kVFull, 1);
  for (int stage = 0; stage < Shape::kStages; ++stage) {
    InitBarrier(shared + Shape::kQFull + 8 * stage, 1);
    InitBarrier(shared + Shape::kQEmpty + 8 * stage, ArrivalsOf(32) * Shape::kConsumerWarps);
    InitBarrier(shared + Shape::kDoutFull + 8 * stage, 1);
    InitBarrier(shared + Shape::kDoutEmpty + 8 * stage, ArrivalsOf(32) * Shape::kConsumerWarps);
    InitBarrier(shared + Shape::kTileFull + 8 * stage, 32);
    InitBarrier(shared + Shape::kTileEmpty + 8 * stage, ArrivalsOf(Shape::kGroups * 128));
  }
  for (int group = 0; group < Shape::kGroups; ++group) {
    InitBarrier(shared + Shape::kStagedFull + 8 * group,
                ArrivalsOf(32) * Shape::kConsumerWarps / Shape::kGroups);
    InitBarrier(shared + Shape::kStagedEmpty + 8 * group, 1);
  }
  FenceBarrierInit();
}

template <typename Shape>
__device__ __forceinline__ void RunBackward(const typename Shape::Params& params, char* memory) {
  const uint32_t shared = SharedAddress(memory);
  if (threadIdx.x == 0) InitBackwardBarriers<Shape>(shared);
  uint32_t ticket = 0;
  if (!Starts<Shape>(params, memory, ticket)) return;
  const auto item = ItemOf<Shape>(params, ticket);
  const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    GiveRegisters<Shape::kProducerRegisters>();
    BackwardProducer<Shape>{params, memory, shared, item}.Run(
        __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0));
  } else {
    TakeRegisters<Shape::kConsumerRegisters>();
    BackwardConsumer<Shape>::Run(params, memory, shared, item, warpgroup - 1);
  }
}

}  // namespace ringattn::worker::cuda::sm90

// Use within namespace ringattn::worker::cuda::sm90. `name` is the kernel's (d128). `run` is the
// class that it runs, with a `shape` whose numbers follow. `blocks` of a cluster share an item.
#define RINGATTN_SM90_BACKWARD_KERNELS_OF(attributes, blocks, name, run, shape, ...)        \
  __global__ void attributes __launch_bounds__(384, 1) sm90_bf16_attention_backward_##name( \
      const __grid_constant__ shape<__nv_bfloat16, __VA_ARGS__>::Params params) {           \
    extern __shared__ __align__(1024) char shared[];                                        \
    run<shape<__nv_bfloat16, __VA_ARGS__>>(params, shared);                                 \
  }                                                                                         \
  __global__ void attributes __launch_bounds__(384, 1) sm90_fp16_attention_backward_##name( \
      const __grid_constant__ shape<__half, __VA_ARGS__>::Params params) {                  \
    extern __shared__ __align__(1024) char shared[];                                        \
    run<shape<__half, __VA_ARGS__>>(params, shared);                                        \
  }                                                                                         \
  BackwardKernel BackwardKernel_##name() {                                                  \
    using Half = shape<__half, __VA_ARGS__>;                                                \
    static_assert(Half::kThreads == 384);                                                   \
    return {reinterpret_cast<const void*>(&sm90_bf16_attention_backward_##name),            \
            reinterpret_cast<const void*>(&sm90_fp16_attention_backward_##name),            \
            Half::kRows,                                                                    \
            Half::kKeys,                                                                    \
            blocks,                                                                         \
            Half::kThreads,                                                                 \
            Half::kSharedBytes};                                                            \
  }
#define RINGATTN_SM90_BACKWARD_KERNELS(name, run, shape, ...) \
  RINGATTN_SM90_BACKWARD_KERNELS_OF(, 1, name, run, shape, __VA_ARGS__)

#define RINGATTN_SM90_BACKWARD(name, ...) \
  RINGATTN_SM90_BACKWARD_KERNELS(name, RunBackward, BackwardShape, __VA_ARGS__)

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_BACKWARD_KERNELS_CUH_
