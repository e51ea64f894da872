// A second, deliberately simple implementation of the kernel contract
// (worker/kernels/attention_kernel.h): fp64, one pair at a time (seen_keys.h). Tests of schedules
// and executors use it instead of the real kernels.
#ifndef RINGATTN_WORKER_KERNELS_NAIVE_NAIVE_KERNELS_H_
#define RINGATTN_WORKER_KERNELS_NAIVE_NAIVE_KERNELS_H_

#include "worker/kernels/attention_kernel.h"

namespace ringattn::worker {

// Runs one call on host memory. Stateless, so thread safe.
void RunNaively(const KernelCall& call);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_KERNELS_NAIVE_NAIVE_KERNELS_H_
