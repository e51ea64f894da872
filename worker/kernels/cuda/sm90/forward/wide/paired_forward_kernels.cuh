// Entry points of a paired forward: clusters of two thread blocks; see forward_kernels.cuh. The
// grid is [2 * items].
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_WIDE_PAIRED_FORWARD_KERNELS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_WIDE_PAIRED_FORWARD_KERNELS_CUH_

#include "worker/kernels/cuda/primitives/shared_tile.cuh"
#include "worker/kernels/cuda/sm90/forward/wide/paired_forward_consumer.cuh"
#include "worker/kernels/cuda/sm90/forward/wide/paired_forward_kernels.h"
#include "worker/kernels/cuda/sm90/forward/wide/paired_forward_producer.cuh"
#include "worker/kernels/cuda/sm90/forward/wide/paired_forward_shape.cuh"

namespace ringattn::worker::cuda::sm90 {

template <typename Shape>
__device__ __forceinline__ void RunPairedForward(const ForwardKernelParams& params, char* memory) {
  const uint32_t shared = SharedAddress(memory);
  const int rank = static_cast<int>(ClusterRank());
  if (threadIdx.x == 0) {
    PrefetchMap(&params.q_map);
    // One consumer group of each block reads a stage.
    constexpr int kReaders = kClusterBlocks * ArrivalsOf(32) * 4;
    InitBarrier(shared + Shape::kQFull, 1);
    for (int stage = 0; stage < Shape::kKeyStages; ++stage) {
      InitBarrier(shared + Shape::kKFull + 8 * stage, 1);
      InitBarrier(shared + Shape::kKEmpty + 8 * stage, kReaders);
    }
    for (int stage = 0; stage < Shape::kValueStages; ++stage) {
      InitBarrier(shared + Shape::kVFull + 8 * stage, 1);
      InitBarrier(shared + Shape::kVEmpty + 8 * stage, kReaders);
    }
    FenceBarrierInit();
    StoreShared(shared + Shape::kStopped, Stopped(params.forward.common.stop_word));
  }
  SyncCluster();
  // Both blocks must get the same answer, because otherwise they would wait for each other forever.
  if (LoadShared(shared + Shape::kStopped) |
      LoadCluster(ClusterAddress(shared + Shape::kStopped, 1 - rank))) {
    SyncCluster();
    return;
  }
  const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    GiveRegisters<Shape::kProducerRegisters>();
    if (threadIdx.x == 0) PairedForwardProducer<Shape>::Run(params, memory, shared, rank);
    __syncwarp();
  } else if (warpgroup == 1) {
    TakeRegisters<Shape::kScoresRegisters>();
    PairedForwardConsumer<Shape>::RunScores(params, memory, shared, rank);
  } else {
    TakeRegisters<Shape::kValuesRegisters>();
    PairedForwardConsumer<Shape>::RunValues(params, shared, rank);
  }
  // Threads of the other block arrive at this block's barriers until the end.
  SyncCluster();
}

}  // namespace ringattn::worker::cuda::sm90

// As RINGATTN_SM90_FORWARD, with the numbers of PairedForwardShape.
#define RINGATTN_SM90_PAIRED_FORWARD(name, ...)                                                \
  __global__ void __cluster_dims__(kClusterBlocks, 1, 1) __launch_bounds__(384, 1)             \
      sm90_bf16_attention_forward_##name(const __grid_constant__ ForwardKernelParams params) { \
    extern __shared__ __align__(1024) char shared[];                                           \
    RunPairedForward<PairedForwardShape<__nv_bfloat16, __VA_ARGS__>>(params, shared);          \
  }                                                                                            \
  __global__ void __cluster_dims__(kClusterBlocks, 1, 1) __launch_bounds__(384, 1)             \
      sm90_fp16_attention_forward_##name(const __grid_constant__ ForwardKernelParams params) { \
    extern __shared__ __align__(1024) char shared[];                                           \
    RunPairedForward<PairedForwardShape<__half, __VA_ARGS__>>(params, shared);                 \
  }                                                                                            \
  ForwardKernel ForwardKernel_##name() {                                                       \
    using Half = PairedForwardShape<__half, __VA_ARGS__>;                                      \
    static_assert(Half::kThreads == 384);                                                      \
    return {reinterpret_cast<const void*>(&sm90_bf16_attention_forward_##name),                \
            reinterpret_cast<const void*>(&sm90_fp16_attention_forward_##name),                \
            Half::kRows,                                                                       \
            Half::kKeys,                                                                       \
            Half::kPanels,                                                                     \
            Half::kThreads,                                                                    \
            Half::kSharedBytes};                                                               \
  }

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_WIDE_PAIRED_FORWARD_KERNELS_CUH_
