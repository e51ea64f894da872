// Attention in fp32 arithmetic without tensor cores. It serves fp32 tensors, and 16-bit tensors on
// devices whose shared memory is too small for the tensor-core kernels. It also serves problems
// with score terms and deterministic backwards in all dtypes. Serves every problem on every device
// of compute capability 8.0 or later.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SIMT_FAMILY_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SIMT_FAMILY_H_

#include "worker/kernels/cuda/launch/family.h"

namespace ringattn::worker::cuda::simt {

KernelFamily Family();

}  // namespace ringattn::worker::cuda::simt

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SIMT_FAMILY_H_
