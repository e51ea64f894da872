// Attention in fp32 arithmetic without tensor cores: the path for fp32 tensors, and for 16-bit
// ones on devices whose shared memory is too small for the tensor-core kernels; and of all types
// for problems with score terms and for backwards that must be deterministic. Serves every problem
// on every device of compute capability 8.0 or later.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SIMT_FAMILY_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SIMT_FAMILY_H_

#include "worker/kernels/cuda/launch/family.h"

namespace ringattn::worker::cuda::simt {

KernelFamily Family();

}  // namespace ringattn::worker::cuda::simt

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SIMT_FAMILY_H_
