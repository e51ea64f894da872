// The part of cuda_kernels_test for scores that fp32 represents in steps of up to 2^100;
// docs/numerics.md states the bounds. Each row has one largest key that no other key approaches.
// Therefore out is that key's value, lse its score, dv the sum of the dout of the rows that chose
// it, and dS is those rows' dlse.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_CHECK_HUGE_SCORES_H_
#define RINGATTN_WORKER_KERNELS_CUDA_CHECK_HUGE_SCORES_H_

#include "worker/kernels/cuda/launch/device_info.h"

namespace ringattn::worker::cuda::check {

// Checks scores of 1e4 to 1e36 (fp16: up to the limit of its elements) in every family and head-dim
// class. 16-bit types are also checked with score terms that change nothing, with deltas that
// exceed fp16's parts (sm90/backward_addends.cuh), and in a fixed order. Returns how many cases
// failed; prints them.
int CheckHugeScores(const DeviceInfo& device);

}  // namespace ringattn::worker::cuda::check

#endif  // RINGATTN_WORKER_KERNELS_CUDA_CHECK_HUGE_SCORES_H_
