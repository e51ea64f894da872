// The kernel contract (worker/kernels/attention_kernel.h) once more, as plainly as
// it can be written: fp64, one pair at a time (seen_keys.h). Lets schedules and executors
// be tested apart from the real kernels.
#ifndef RINGATTN_WORKER_KERNELS_NAIVE_NAIVE_KERNELS_H_
#define RINGATTN_WORKER_KERNELS_NAIVE_NAIVE_KERNELS_H_

#include "worker/kernels/attention_kernel.h"

namespace ringattn::worker {

// Runs one call on host memory. Thread safe: no state.
void RunNaively(const KernelCall& call);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_KERNELS_NAIVE_NAIVE_KERNELS_H_
