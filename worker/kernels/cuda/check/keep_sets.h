// Dropout's exact keep set, read from the kernels' results pair by pair: the part of
// cuda_kernels_test that a bound on errors cannot cover. With equal scores and one-hot values, out
// has one element per pair; with one-hot dout, so has dv.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_CHECK_KEEP_SETS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_CHECK_KEEP_SETS_H_

#include <string>

#include "worker/kernels/cuda/launch/device_info.h"

namespace ringattn::worker::cuda::check {

// Checks every dtype, for consecutive and other positions, with origins and packed. Returns how
// many sets are wrong; prints them. `family`: forces its kernels, in the dtypes that they support;
// empty: the kernels that are chosen.
int CheckKeepSets(const DeviceInfo& device, const std::string& family = "");

}  // namespace ringattn::worker::cuda::check

#endif  // RINGATTN_WORKER_KERNELS_CUDA_CHECK_KEEP_SETS_H_
