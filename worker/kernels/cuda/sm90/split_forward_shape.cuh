// The numbers of a kernel for few q rows and split keys: ForwardShape's, of one consumer group.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_SPLIT_FORWARD_SHAPE_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_SPLIT_FORWARD_SHAPE_CUH_

#include "worker/kernels/cuda/sm90/forward_shape.cuh"

namespace ringattn::worker::cuda::sm90 {

template <typename T, int kDim, int kKeys, int kStages>
struct SplitForwardShape : ForwardShape<T, kDim, 64, kKeys, false, kStages> {};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_SPLIT_FORWARD_SHAPE_CUH_
