// The cost of probabilities of chosen rows, compared with the forward of the same problem.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_CHECK_PROBABILITY_SPEED_H_
#define RINGATTN_WORKER_KERNELS_CUDA_CHECK_PROBABILITY_SPEED_H_

#include "worker/kernels/cuda/launch/device_info.h"

namespace ringattn::worker::cuda::check {

// Prints a line for 64 rows at 65,536 causal tokens, for one row there, and for one query of
// 1,048,576 keys: 32 heads on 8, head_dim 128, bf16. Each line has the best of three calls, the
// plain forward's time, and the ratio. The ratio of the first line should be at most 0.10.
void PrintProbabilitySpeed(const DeviceInfo& device);

}  // namespace ringattn::worker::cuda::check

#endif  // RINGATTN_WORKER_KERNELS_CUDA_CHECK_PROBABILITY_SPEED_H_
