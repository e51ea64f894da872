// Prints the speed of forwards and backwards with head dims above 256, next to that of head_dim 256
// with the same number of operations, and of the portable kernels.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_CHECK_WIDE_SPEED_H_
#define RINGATTN_WORKER_KERNELS_CUDA_CHECK_WIDE_SPEED_H_

#include "worker/kernels/cuda/cuda_kernels.h"

namespace ringattn::worker::cuda::check {

void PrintWideSpeed(const DeviceInfo& device);

}  // namespace ringattn::worker::cuda::check

#endif  // RINGATTN_WORKER_KERNELS_CUDA_CHECK_WIDE_SPEED_H_
