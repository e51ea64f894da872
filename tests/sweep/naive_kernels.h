// The kernel contract (worker/kernels/attention_kernel.h) once more, as plainly as
// it can be written: fp64, one pair at a time, visibility by the band's definition.
// Lets schedules and executors be tested apart from the real kernels.
#ifndef RINGATTN_TESTS_SWEEP_NAIVE_KERNELS_H_
#define RINGATTN_TESTS_SWEEP_NAIVE_KERNELS_H_

#include "worker/kernels/attention_kernel.h"

namespace ringattn::tests {

using namespace ringattn::worker;  // what is under test

// Runs one call on host memory. Thread safe: no state.
void RunNaively(const KernelCall& call);

}  // namespace ringattn::tests

#endif  // RINGATTN_TESTS_SWEEP_NAIVE_KERNELS_H_
