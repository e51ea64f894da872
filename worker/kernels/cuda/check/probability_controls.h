// Control of chosen rows' probabilities, beside the random cases that ask for them.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_CHECK_PROBABILITY_CONTROLS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_CHECK_PROBABILITY_CONTROLS_H_

#include "worker/kernels/cuda/launch/device_info.h"

namespace ringattn::worker::cuda::check {

// Equal scores, so that a row's weights are 1 in its number of keys: from one call and from three,
// by the kernel for many rows and by that for few; a row of no document has zeros; a stopped call
// stores no weight.
bool ProbabilitiesAreProbabilities(const DeviceInfo& device);

}  // namespace ringattn::worker::cuda::check

#endif  // RINGATTN_WORKER_KERNELS_CUDA_CHECK_PROBABILITY_CONTROLS_H_
