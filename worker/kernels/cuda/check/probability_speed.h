// What probabilities of chosen rows cost beside the forward that they are asked with.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_CHECK_PROBABILITY_SPEED_H_
#define RINGATTN_WORKER_KERNELS_CUDA_CHECK_PROBABILITY_SPEED_H_

#include "worker/kernels/cuda/launch/device_info.h"

namespace ringattn::worker::cuda::check {

// Prints a line for 64 rows at 65,536 causal tokens, one row there, and the one query of 1,048,576
// keys: 32 heads on 8, head_dim 128, bf16; the best of three calls, the plain forward's time, and
// the ratio. The first is to be at most 0.10.
void PrintProbabilitySpeed(const DeviceInfo& device);

}  // namespace ringattn::worker::cuda::check

#endif  // RINGATTN_WORKER_KERNELS_CUDA_CHECK_PROBABILITY_SPEED_H_
