// A kernel without instructions, to measure what a launch costs.
#ifndef RINGATTN_TESTS_BENCH_EMPTY_KERNEL_H_
#define RINGATTN_TESTS_BENCH_EMPTY_KERNEL_H_

namespace ringattn::worker {

// Takes no parameters.
const void* EmptyKernel();

}  // namespace ringattn::worker

#endif  // RINGATTN_TESTS_BENCH_EMPTY_KERNEL_H_
