// How fast calls with score terms are, each term alone and all of them, beside the same call
// without: 8,192 causal tokens, 32 heads on 8, head_dim 128, bf16.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_CHECK_TERM_SPEED_H_
#define RINGATTN_WORKER_KERNELS_CUDA_CHECK_TERM_SPEED_H_

#include <string>

#include "worker/kernels/cuda/launch/device_info.h"

namespace ringattn::worker::cuda::check {

// Prints a line for each: TFLOP/s of the pairs that the band shows, forward, backward and of a
// bias's gradient. The best of three calls.
// `family`: with terms its kernels, forced.
void PrintTermSpeed(const DeviceInfo& device, const std::string& family = "");

}  // namespace ringattn::worker::cuda::check

#endif  // RINGATTN_WORKER_KERNELS_CUDA_CHECK_TERM_SPEED_H_
