// Scores that fp32 holds in steps of up to 2^100: the part of cuda_kernels_test that checks what
// docs/numerics.md promises of them. Rows have one largest key that no other comes near, so that
// out is its value, lse its score, dv the sum of the dout of the rows that chose it, and dS their
// dlse.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_CHECK_HUGE_SCORES_H_
#define RINGATTN_WORKER_KERNELS_CUDA_CHECK_HUGE_SCORES_H_

#include "worker/kernels/cuda/launch/device_info.h"

namespace ringattn::worker::cuda::check {

// Scores of 1e4 to 1e36 (fp16: to what its elements reach), in every family and head-dim class; of
// 16-bit types also with score terms that change nothing, with deltas that fp16 has no parts for
// (sm90/backward_addends.cuh), and in a fixed order. How many cases failed; prints which.
int CheckHugeScores(const DeviceInfo& device);

}  // namespace ringattn::worker::cuda::check

#endif  // RINGATTN_WORKER_KERNELS_CUDA_CHECK_HUGE_SCORES_H_
