// Entry points of a forward with score terms: both dtypes of one head-dim class.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_FORWARD_KERNELS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_FORWARD_KERNELS_CUH_

#include "worker/kernels/cuda/primitives/shared_tile.cuh"
#include "worker/kernels/cuda/sm90/terms/terms_forward_consumer.cuh"
#include "worker/kernels/cuda/sm90/terms/terms_forward_producer.cuh"
#include "worker/kernels/cuda/sm90/terms/terms_kernels.h"

namespace ringattn::worker::cuda::sm90 {

template <typename Shape>
__device__ __forceinline__ void RunTermForward(const TermForwardKernelParams& params,
                                               char* memory) {
  const uint32_t shared = SharedAddress(memory);
  const bool biased = Shape::kBiased && params.terms.bias != nullptr;
  if (threadIdx.x == 0) {
    PrefetchMap(&params.q_map);
    InitBarrier(shared + Shape::kQFull, 1);
    InitBarrier(shared + Shape::kQEmpty,
                ArrivalsOf(32) * (Shape::kConsumerWarps + (biased ? 1 : 0)));
    for (int i = 0; i < Shape::kGroups * Shape::kBiasStages; ++i) {
      InitBarrier(shared + Shape::kBiasFull + 8 * i, 1);
      InitBarrier(shared + Shape::kBiasEmpty + 8 * i, ArrivalsOf(32) * 4);  // a group's warps
    }
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      InitBarrier(shared + Shape::kKFull + 8 * stage, ArrivalsOf(32));
      InitBarrier(shared + Shape::kKEmpty + 8 * stage, ArrivalsOf(32) * Shape::kConsumerWarps);
      InitBarrier(shared + Shape::kVFull + 8 * stage, 1);
      InitBarrier(shared + Shape::kVEmpty + 8 * stage, ArrivalsOf(32) * Shape::kConsumerWarps);
    }
    FenceBarrierInit();
  }
  if constexpr (Shape::kAlibi) AlibiOffsets<Shape>::Write(memory);
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    GiveRegisters<Shape::kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
    TermForwardProducer<Shape> producer{params, memory, shared, static_cast<int>(threadIdx.x) & 31,
                                        {},     {}};
    if (warp == 0) {
      producer.Run();
    } else if constexpr (Shape::kBiased) {
      if (warp == 1 && biased) producer.LoadBias();
    }
  } else {
    TakeRegisters<Shape::kConsumerRegisters>();
    TermForwardConsumer<Shape>::Run(params, memory, shared, warpgroup - 1);
  }
}

}  // namespace ringattn::worker::cuda::sm90

// Use within namespace ringattn::worker::cuda::sm90. `name` is the kernel's (terms_d128); the
// arguments of TermForwardShape follow.
#define RINGATTN_SM90_TERM_FORWARD(name, threads, ...)                                             \
  __global__ void __launch_bounds__(threads, 1)                                                    \
      sm90_bf16_attention_forward_##name(const __grid_constant__ TermForwardKernelParams params) { \
    extern __shared__ __align__(1024) char shared[];                                               \
    RunTermForward<TermForwardShape<__nv_bfloat16, __VA_ARGS__>>(params, shared);                  \
  }                                                                                                \
  __global__ void __launch_bounds__(threads, 1)                                                    \
      sm90_fp16_attention_forward_##name(const __grid_constant__ TermForwardKernelParams params) { \
    extern __shared__ __align__(1024) char shared[];                                               \
    RunTermForward<TermForwardShape<__half, __VA_ARGS__>>(params, shared);                         \
  }                                                                                                \
  ForwardKernel ForwardKernel_##name() {                                                           \
    using Half = TermForwardShape<__half, __VA_ARGS__>;                                            \
    static_assert(Half::kThreads == threads);                                                      \
    return {reinterpret_cast<const void*>(&sm90_bf16_attention_forward_##name),                    \
            reinterpret_cast<const void*>(&sm90_fp16_attention_forward_##name),                    \
            Half::kRows,                                                                           \
            Half::kKeys,                                                                           \
            Half::kPanels,                                                                         \
            threads,                                                                               \
            Half::kSharedBytes};                                                                   \
  }

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_FORWARD_KERNELS_CUH_
