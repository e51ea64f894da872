// What is neither a random case nor a huge score: the stop word ends kernels; sums,
// merges and copies are what they are called.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_CHECK_CONTROLS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_CHECK_CONTROLS_H_

#include <cstdint>

#include "worker/kernels/cuda/launch/device_info.h"

namespace ringattn::worker::cuda::check {

// How many of the checks failed; prints which.
int CheckControls(const DeviceInfo& device);

}  // namespace ringattn::worker::cuda::check

#endif  // RINGATTN_WORKER_KERNELS_CUDA_CHECK_CONTROLS_H_
