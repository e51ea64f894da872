// Entry points of a column backward: clusters of two thread blocks; see backward_kernels.cuh. The
// grid is [2 * items].
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_COLUMNS_COLUMN_BACKWARD_KERNELS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_COLUMNS_COLUMN_BACKWARD_KERNELS_CUH_

#include "worker/kernels/cuda/sm90/backward/backward_kernels.cuh"
#include "worker/kernels/cuda/sm90/backward/columns/column_backward_consumer.cuh"
#include "worker/kernels/cuda/sm90/backward/columns/column_backward_kernels.h"
#include "worker/kernels/cuda/sm90/backward/columns/column_backward_producer.cuh"
#include "worker/kernels/cuda/sm90/backward/columns/column_backward_shape.cuh"
#include "worker/kernels/cuda/sm90/primitives/cluster.cuh"

namespace ringattn::worker::cuda::sm90 {

template <typename Shape>
__device__ __forceinline__ void InitColumnBackwardBarriers(uint32_t shared) {
  constexpr int kWarp = ArrivalsOf(32);
  InitBarrier(shared + Shape::kKFull, 1);
  InitBarrier(shared + Shape::kVFull, 1);
  for (int slot = 0; slot < Shape::kSlots; ++slot) {
    InitBarrier(shared + Shape::kSlotFull + 8 * slot, 1);
    InitBarrier(shared + Shape::kSlotEmpty + 8 * slot, kWarp * Shape::kConsumerWarps);
  }
  for (int stage = 0; stage < Shape::kStages; ++stage) {
    InitBarrier(shared + Shape::kTileFull + 8 * stage, 32);
    InitBarrier(shared + Shape::kTileEmpty + 8 * stage, kWarp * Shape::kConsumerWarps);
  }
  for (int group = 0; group < Shape::kGroups; ++group) {
    InitBarrier(shared + Shape::kPartFull + 8 * group, 1);
    // The keys group reads P, and both groups read dS.
    InitBarrier(shared + Shape::kPartEmpty + 8 * group, kWarp * 4 * (1 + group));
  }
  for (int box = 0; box < Shape::kGroups * Shape::kBoxes; ++box) {
    InitBarrier(shared + Shape::kStagedFull + 8 * box, kWarp * 4);
    InitBarrier(shared + Shape::kStagedEmpty + 8 * box, 1);
  }
  FenceBarrierInit();
}

template <typename Shape>
__device__ __forceinline__ void RunColumnBackward(const typename Shape::Params& params,
                                                  char* memory) {
  const uint32_t shared = SharedAddress(memory);
  const int rank = static_cast<int>(ClusterRank());
  if (threadIdx.x == 0) {
    InitColumnBackwardBarriers<Shape>(shared);
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
    ColumnBackwardProducer<Shape>{{{params, memory, shared, item}}, rank * Shape::kDim}.Run(
        __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0));
  } else if (warpgroup == 1) {
    TakeRegisters<Shape::kValuesRegisters>();
    ColumnBackwardConsumer<Shape>::template Run<0>(params, memory, shared, item, rank);
  } else {
    TakeRegisters<Shape::kKeysRegisters>();
    ColumnBackwardConsumer<Shape>::template Run<1>(params, memory, shared, item, rank);
  }
  // Threads of the other block arrive at this block's barriers until the end.
  SyncCluster();
}

}  // namespace ringattn::worker::cuda::sm90

// As RINGATTN_SM90_BACKWARD, with the numbers of ColumnBackwardShape.
#define RINGATTN_SM90_COLUMN_BACKWARD(name, ...)                                                  \
  RINGATTN_SM90_BACKWARD_KERNELS_OF(__cluster_dims__(kClusterBlocks, 1, 1), kClusterBlocks, name, \
                                    RunColumnBackward, ColumnBackwardShape, __VA_ARGS__)

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_COLUMNS_COLUMN_BACKWARD_KERNELS_CUH_
