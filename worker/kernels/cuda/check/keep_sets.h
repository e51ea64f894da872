// Dropout's exact keep set, read out of the kernels pair by pair: the part of cuda_kernels_test
// that a bound on errors cannot do. With equal scores and one-hot values, out has an element for
// each pair; with one-hot dout, so has dv.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_CHECK_KEEP_SETS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_CHECK_KEEP_SETS_H_

#include <string>

#include "worker/kernels/cuda/launch/device_info.h"

namespace ringattn::worker::cuda::check {

// In every dtype, for positions that follow one another and that do not, with origins and packed.
// How many sets were wrong; prints which. `family`: of its kernels, in the dtypes that they have,
// rather than of those that serve by themselves.
int CheckKeepSets(const DeviceInfo& device, const std::string& family = "");

}  // namespace ringattn::worker::cuda::check

#endif  // RINGATTN_WORKER_KERNELS_CUDA_CHECK_KEEP_SETS_H_
