// Check of chosen rows' probabilities, in addition to the random cases with such rows.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_CHECK_PROBABILITY_CONTROLS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_CHECK_PROBABILITY_CONTROLS_H_

#include "worker/kernels/cuda/launch/device_info.h"

namespace ringattn::worker::cuda::check {

// All scores are equal, so a row's weights are 1 divided by its number of keys. Checks one call and
// three calls, with the kernel for many rows and the one for few. A row without a document must
// have zeros; a stopped call must store no weight.
bool ProbabilitiesAreProbabilities(const DeviceInfo& device);

}  // namespace ringattn::worker::cuda::check

#endif  // RINGATTN_WORKER_KERNELS_CUDA_CHECK_PROBABILITY_CONTROLS_H_
