// The speed of calls with each score term and with all of them, compared with the same call without
// terms: 8,192 causal tokens, 32 heads on 8, head_dim 128, bf16.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_CHECK_TERM_SPEED_H_
#define RINGATTN_WORKER_KERNELS_CUDA_CHECK_TERM_SPEED_H_

#include <string>

#include "worker/kernels/cuda/launch/device_info.h"

namespace ringattn::worker::cuda::check {

// Prints a line for each: TFLOP/s of the pairs that the band shows, for the forward, the backward
// and a bias's gradient. Each is the best of three calls. `family`: forces its kernels for calls
// with terms.
void PrintTermSpeed(const DeviceInfo& device, const std::string& family = "");

}  // namespace ringattn::worker::cuda::check

#endif  // RINGATTN_WORKER_KERNELS_CUDA_CHECK_TERM_SPEED_H_
