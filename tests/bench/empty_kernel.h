// Kernels that compute nothing, to measure what a launch costs.
#ifndef RINGATTN_TESTS_BENCH_EMPTY_KERNEL_H_
#define RINGATTN_TESTS_BENCH_EMPTY_KERNEL_H_

namespace ringattn::worker {

// A kernel without instructions. Takes no parameters.
const void* EmptyKernel();

// A kernel that ends when the GPU's timer has advanced by its parameter, an unsigned long long in
// nanoseconds.
const void* WaitingKernel();

}  // namespace ringattn::worker

#endif  // RINGATTN_TESTS_BENCH_EMPTY_KERNEL_H_
