// Entry points of a backward with score terms: both dtypes of one head-dim class.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_BACKWARD_KERNELS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_BACKWARD_KERNELS_CUH_

#include "worker/kernels/cuda/sm90/backward/backward_kernels.cuh"
#include "worker/kernels/cuda/sm90/terms/terms_backward_consumer.cuh"
#include "worker/kernels/cuda/sm90/terms/terms_backward_producer.cuh"
#include "worker/kernels/cuda/sm90/terms/terms_kernels.h"

namespace ringattn::worker::cuda::sm90 {

template <typename Shape>
__device__ __forceinline__ void RunTermBackward(const typename Shape::Params& params,
                                                char* memory) {
  const uint32_t shared = SharedAddress(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kGroups * Shape::kBiasStages; ++i) {
      InitBarrier(shared + Shape::kBiasFull + 8 * i, 1);
      InitBarrier(shared + Shape::kBiasEmpty + 8 * i, ArrivalsOf(32) * 4);  // a group's warps
    }
    InitBackwardBarriers<Shape>(shared);  // and fences
  }
  uint32_t ticket = 0;
  if (!Starts<Shape>(params, memory, ticket)) return;
  const auto item = ItemOf<Shape>(params, ticket);
  const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    GiveRegisters<Shape::kProducerRegisters>();
    TermBackwardProducer<Shape>{params, memory, shared, item}.Run(
        __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0));
  } else {
    TakeRegisters<Shape::kConsumerRegisters>();
    TermBackwardConsumer<Shape>::Run(params, memory, shared, item, warpgroup - 1);
  }
}

}  // namespace ringattn::worker::cuda::sm90

// Use within namespace ringattn::worker::cuda::sm90. `name` is the kernel's (terms_d128); the
// arguments of TermBackwardShape follow.
#define RINGATTN_SM90_TERM_BACKWARD(name, ...) \
  RINGATTN_SM90_BACKWARD_KERNELS(name, RunTermBackward, TermBackwardShape, __VA_ARGS__)

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_BACKWARD_KERNELS_CUH_
