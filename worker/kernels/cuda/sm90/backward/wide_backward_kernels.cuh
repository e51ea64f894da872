// Entry points of one head-dim class of the wide backward; see backward_kernels.cuh.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_WIDE_BACKWARD_KERNELS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_WIDE_BACKWARD_KERNELS_CUH_

#include "worker/kernels/cuda/sm90/backward/backward_kernels.cuh"
#include "worker/kernels/cuda/sm90/backward/wide_backward_consumer.cuh"
#include "worker/kernels/cuda/sm90/backward/wide_backward_producer.cuh"
#include "worker/kernels/cuda/sm90/backward/wide_backward_shape.cuh"

namespace ringattn::worker::cuda::sm90 {

template <typename Shape>
__device__ __forceinline__ void InitWideBackwardBarriers(uint32_t shared) {
  InitBarrier(shared + Shape::kKFull, 1);
  InitBarrier(shared + Shape::kVFull, 1);
  for (int slot = 0; slot < Shape::kSlots; ++slot) {
    InitBarrier(shared + Shape::kSlotFull + 8 * slot, 1);
    InitBarrier(shared + Shape::kSlotEmpty + 8 * slot, ArrivalsOf(32) * Shape::kConsumerWarps);
  }
  for (int stage = 0; stage < Shape::kStages; ++stage) {
    InitBarrier(shared + Shape::kTileFull + 8 * stage, 32);
    InitBarrier(shared + Shape::kTileEmpty + 8 * stage, ArrivalsOf(Shape::kGroups * 128));
  }
  for (int box = 0; box < Shape::kGroups * Shape::kBoxes; ++box) {
    InitBarrier(shared + Shape::kStagedFull + 8 * box,
                ArrivalsOf(32) * Shape::kConsumerWarps / Shape::kGroups);
    InitBarrier(shared + Shape::kStagedEmpty + 8 * box, 1);
  }
  FenceBarrierInit();
}

template <typename Shape>
__device__ __forceinline__ void RunWideBackward(const typename Shape::Params& params,
                                                char* memory) {
  const uint32_t shared = SharedAddress(memory);
  if (threadIdx.x == 0) InitWideBackwardBarriers<Shape>(shared);
  uint32_t ticket = 0;
  if (!Starts<Shape>(params, memory, ticket)) return;
  const auto item = ItemOf<Shape>(params, ticket);
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

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_WIDE_BACKWARD_KERNELS_CUH_
