// Entry points of one head-dim class of the ordered backward (ordered_backward.h); see
// backward_kernels.cuh and wide_backward_kernels.cuh, whose shapes' arguments these take.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_INSTANCES_ORDERED_BACKWARD_KERNELS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_INSTANCES_ORDERED_BACKWARD_KERNELS_CUH_

#include "worker/kernels/cuda/sm90/backward/backward_kernels.cuh"
#include "worker/kernels/cuda/sm90/backward/backward_turns.cuh"
#include "worker/kernels/cuda/sm90/backward/wide_backward_kernels.cuh"
#include "worker/kernels/cuda/sm90/terms/terms_backward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {

template <typename Base, typename Params_ = OrderedBackwardKernelParams>
struct OrderedShape : Base {
  using Params = Params_;
  using Item = OrderedItem;
  static constexpr bool kOrdered = true;
  static constexpr uint32_t kNoTicket = 0xffffffff;
};
template <typename T, int kDim, int kRows, bool kCapped>
using OrderedBackwardShape = OrderedShape<BackwardShape<T, kDim, kRows, kCapped>>;
template <typename T, int kDim, bool kCapped>
using OrderedWideBackwardShape = OrderedShape<WideBackwardShape<T, kDim, kCapped>>;
template <typename T, int kDim, int kRows, bool kBiased, bool kDrops, bool kStores = false>
using OrderedTermBackwardShape =
    OrderedShape<TermBackwardShape<T, kDim, kRows, kBiased, kDrops, kStores>,
                 OrderedTermBackwardKernelParams>;

}  // namespace ringattn::worker::cuda::sm90

#define RINGATTN_SM90_ORDERED_BACKWARD(name, ...) \
  RINGATTN_SM90_BACKWARD_KERNELS(name, RunBackward, OrderedBackwardShape, __VA_ARGS__)
#define RINGATTN_SM90_ORDERED_WIDE_BACKWARD(name, ...) \
  RINGATTN_SM90_BACKWARD_KERNELS(name, RunWideBackward, OrderedWideBackwardShape, __VA_ARGS__)

#define RINGATTN_SM90_ORDERED_TERM_BACKWARD(name, ...) \
  RINGATTN_SM90_BACKWARD_KERNELS(name, RunTermBackward, OrderedTermBackwardShape, __VA_ARGS__)

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_INSTANCES_ORDERED_BACKWARD_KERNELS_CUH_
