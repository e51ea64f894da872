// Entry points of a paired backward: clusters of two thread blocks; see backward_kernels.cuh.
// The grid is [2 * items].
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_PAIRED_BACKWARD_KERNELS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_PAIRED_BACKWARD_KERNELS_CUH_

#include "worker/kernels/cuda/sm90/backward/backward_kernels.cuh"
#include "worker/kernels/cuda/sm90/backward/paired_backward_consumer.cuh"
#include "worker/kernels/cuda/sm90/backward/paired_backward_producer.cuh"
#include "worker/kernels/cuda/sm90/backward/paired_backward_shape.cuh"
#include "worker/kernels/cuda/sm90/primitives/cluster.cuh"

namespace ringattn::worker::cuda::sm90 {

template <typename Shape>
__device__ __forceinline__ void InitPairedBackwardBarriers(uint32_t shared) {
  constexpr int kWarp = ArrivalsOf(32);
  InitBarrier(shared + Shape::kKFull, 1);
  InitBarrier(shared + Shape::kVFull, 1);
  constexpr int kBothBlocks = kClusterBlocks * kWarp * Shape::kConsumerWarps;
  for (int slot = 0; slot < Shape::kDoutSlots; ++slot) {
    InitBarrier(shared + Shape::kDoutFull + 8 * slot, 1);
    InitBarrier(shared + Shape::kDoutEmpty + 8 * slot, kBothBlocks);
  }
  for (int stage = 0; stage < Shape::kStages; ++stage) {
    InitBarrier(shared + Shape::kQFull + 8 * stage, 1);
    InitBarrier(shared + Shape::kQEmpty + 8 * stage, kBothBlocks);
    InitBarrier(shared + Shape::kTileFull + 8 * stage, 32);
    InitBarrier(shared + Shape::kTileEmpty + 8 * stage, kWarp * Shape::kConsumerWarps);
    InitBarrier(shared + Shape::kScoresFull + 8 * stage, kWarp * 4);
    InitBarrier(shared + Shape::kOtherScoresFull + 8 * stage, 1);
    InitBarrier(shared + Shape::kScoresEmpty + 8 * stage, kBothBlocks);
  }
  for (int group = 0; group < Shape::kGroups; ++group) {
    InitBarrier(shared + Shape::kStagedFull + 8 * group, kWarp * 4);
    InitBarrier(shared + Shape::kStagedEmpty + 8 * group, 1);
  }
  FenceBarrierInit();
}

template <typename Shape>
__device__ __forceinline__ void RunPairedBackward(const typename Shape::Params& params,
                                                  char* memory) {
  const uint32_t shared = SharedAddress(memory);
  const int rank = static_cast<int>(ClusterRank());
  if (threadIdx.x == 0) {
    InitPairedBackwardBarriers<Shape>(shared);
    StoreShared(shared + Shape::kStopped, Stopped(params.common.stop_word));
  }
  SyncCluster();
  // Both blocks must get the same answer, because otherwise they would wait for each other forever.
  if (LoadShared(shared + Shape::kStopped) |
      LoadCluster(ClusterAddress(shared + Shape::kStopped, 1 - rank))) {
    SyncCluster();
    return;
  }
  const BackwardItem item(params, blockIdx.x / kClusterBlocks);
  const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    GiveRegisters<Shape::kProducerRegisters>();
    PairedBackwardProducer<Shape>{{params, memory, shared, item}, rank}.Run(
        __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0));
  } else if (warpgroup == 1) {
    TakeRegisters<Shape::kConsumerRegisters>();
    PairedBackwardConsumer<Shape>::template Run<0>(params, memory, shared, item, rank);
  } else {
    TakeRegisters<Shape::kConsumerRegisters>();
    PairedBackwardConsumer<Shape>::template Run<1>(params, memory, shared, item, rank);
  }
  // Threads of the other block arrive at this block's barriers until the end.
  SyncCluster();
}

}  // namespace ringattn::worker::cuda::sm90

// As RINGATTN_SM90_BACKWARD, with the numbers of PairedBackwardShape.
#define RINGATTN_SM90_PAIRED_BACKWARD(name, ...)                                                  \
  RINGATTN_SM90_BACKWARD_KERNELS_OF(__cluster_dims__(kClusterBlocks, 1, 1), kClusterBlocks, name, \
                                    RunPairedBackward, PairedBackwardShape, __VA_ARGS__)

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_PAIRED_BACKWARD_KERNELS_CUH_
