// Attention on tensor cores by mma.sync: bf16 and fp16 at every head_dim, on every device of
// compute capability 8.0 or later that has the shared memory for its tiles.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM80_FAMILY_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM80_FAMILY_H_

#include "worker/kernels/cuda/launch/family.h"

namespace ringattn::worker::cuda::sm80 {

KernelFamily Family();

}  // namespace ringattn::worker::cuda::sm80

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM80_FAMILY_H_
