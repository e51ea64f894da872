// Attention on the tensor cores of compute capability 9.0 by wgmma and bulk tensor copies: the
// forward in bf16 and fp16, of head_dim above 32 (forward.h), and the backward of those up to 128
// (backward.h). Its instructions exist in no later architecture either.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FAMILY_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FAMILY_H_

#include <optional>

#include "worker/kernels/cuda/launch/family.h"

namespace ringattn::worker::cuda::sm90 {

// None in builds without Hopper among the architectures.
std::optional<KernelFamily> Family();

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_FAMILY_H_
