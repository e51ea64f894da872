// The numbers of a kernel for few q rows and split keys: those of ForwardShape with one consumer
// group that merges parts.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_SPLIT_FORWARD_SHAPE_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_SPLIT_FORWARD_SHAPE_CUH_

#include "worker/kernels/cuda/sm90/forward/forward_shape.cuh"

namespace ringattn::worker::cuda::sm90 {

template <typename T, int kDim, int kKeys, int kStages>
struct SplitForwardShape : ForwardShape<T, kDim, 64, kKeys, false, kStages> {
  using Base = ForwardShape<T, kDim, 64, kKeys, false, kStages>;
  static constexpr bool kMergesParts = true;
  static constexpr int kLastPart = Base::kSharedBytes;  // a word: whether the item was the last
                                                        // part
  static constexpr int kSharedBytes = kLastPart + 8;
  static_assert(kSharedBytes <= 232448, "more shared memory than a block can have");
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_SPLIT_FORWARD_SHAPE_CUH_
