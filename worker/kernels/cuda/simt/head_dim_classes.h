// The head-dim classes of the kernels without tensor cores: a kernel of a class serves all problems
// whose larger head dimension is at most the class. No CUDA headers.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SIMT_HEAD_DIM_CLASSES_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SIMT_HEAD_DIM_CLASSES_H_

namespace ringattn::worker::cuda::simt {

// kMaxHeadDim of common/base/limits.h.
inline constexpr int kWidestClass = 576;
inline constexpr int kHeadDimClasses[] = {64, 128, 256, kWidestClass};

}  // namespace ringattn::worker::cuda::simt

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SIMT_HEAD_DIM_CLASSES_H_
