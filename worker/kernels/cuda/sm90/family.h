// Attention on the tensor cores of compute capability 9.0 by wgmma and bulk tensor copies, in bf16
// and fp16: the forward (forward.h) and the backward (backward.h). Later architectures do not have
// these instructions.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FAMILY_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FAMILY_H_

#include <optional>

#include "worker/kernels/cuda/launch/family.h"

namespace ringattn::worker::cuda::sm90 {

// Returns no value in builds without Hopper among the architectures.
std::optional<KernelFamily> Family();

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_FAMILY_H_
