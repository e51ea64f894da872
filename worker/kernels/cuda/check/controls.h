// Checks other than random cases and huge scores: the stop word ends kernels, and sums, merges and
// copies return the right results.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_CHECK_CONTROLS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_CHECK_CONTROLS_H_

#include <cstdint>

#include "worker/kernels/cuda/launch/device_info.h"

namespace ringattn::worker::cuda::check {

// Returns how many checks failed; prints their names.
int CheckControls(const DeviceInfo& device);

}  // namespace ringattn::worker::cuda::check

#endif  // RINGATTN_WORKER_KERNELS_CUDA_CHECK_CONTROLS_H_
