// Entry points of one head-dim class of the ordered backward (ordered_backward.h); see
// backward_kernels.cuh and wide_backward_kernels.cuh, whose shapes' arguments these take.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_ORDERED_BACKWARD_KERNELS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_ORDERED_BACKWARD_KERNELS_CUH_

#include "worker/kernels/cuda/sm90/backward_kernels.cuh"
#include "worker/kernels/cuda/sm90/backward_turns.cuh"
#include "worker/kernels/cuda/sm90/wide_backward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {

template <typename Base>
struct OrderedShape : Base {
  using Params = OrderedBackwardKernelParams;
  using Item = OrderedItem;
  static constexpr bool kOrdered = true;
  static constexpr uint32_t kNoTicket = 0xffffffff;
  static constexpr int kTicket = Base::kSharedBytes;
  static constexpr int kSharedBytes = kTicket + 8;
  static_assert(kTicket % 8 == 0);
  static_assert(kSharedBytes <= 232448, "more shared memory than a block can have");
};
template <typename T, int kDim, int kRows, bool kCapped>
using OrderedBackwardShape = OrderedShape<BackwardShape<T, kDim, kRows, kCapped>>;
template <typename T, int kDim, bool kCapped>
using OrderedWideBackwardShape = OrderedShape<WideBackwardShape<T, kDim, kCapped>>;

}  // namespace ringattn::worker::cuda::sm90

#define RINGATTN_SM90_ORDERED_BACKWARD(name, ...) \
  RINGATTN_SM90_BACKWARD_KERNELS(name, RunBackward, OrderedBackwardShape, __VA_ARGS__)
#define RINGATTN_SM90_ORDERED_WIDE_BACKWARD(name, ...) \
  RINGATTN_SM90_BACKWARD_KERNELS(name, RunWideBackward, OrderedWideBackwardShape, __VA_ARGS__)

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_ORDERED_BACKWARD_KERNELS_CUH_
