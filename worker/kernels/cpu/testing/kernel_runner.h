// Runs CpuKernels on a TestData and compares with the naive reference. For the
// tests of this folder.
#ifndef RINGATTN_WORKER_KERNELS_CPU_TESTING_KERNEL_RUNNER_H_
#define RINGATTN_WORKER_KERNELS_CPU_TESTING_KERNEL_RUNNER_H_

#include <vector>

#include "worker/kernels/cpu/cpu_kernels.h"
#include "worker/kernels/cpu/testing/naive_reference.h"

namespace ringattn::worker {

using Floats = std::vector<float>;

struct ForwardResult {
  Floats out;  // converted to fp32
  Floats lse;
};

struct BackwardResult {
  Floats dq;
  std::vector<Floats> dk, dv;  // per block
};

// Expects success.
void RunOrDie(CpuKernels& kernels, const KernelCall& call);

// One call per group of blocks: groups[i] is the number of blocks of call i.
ForwardResult RunForward(CpuKernels& kernels, TestData& data, const std::vector<int>& groups);

// With the reference's lse and delta.
BackwardResult RunBackward(CpuKernels& kernels, TestData& data, const Reference& reference);

void ExpectForward(const TestShape& shape, const ForwardResult& result, const Reference& reference);
void ExpectBackward(const TestShape& shape, const BackwardResult& result,
                    const Reference& reference);

// Forward in one call and in one call per block, and backward, on random data.
void Check(const TestShape& shape, float magnitude = 1.0f, int threads = 2);

// Two documents on rank 1 of 2 in a striped layout, with a hole that belongs to no piece; keys in
// two blocks of many short pieces.
TestShape PiecesShape();

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_KERNELS_CPU_TESTING_KERNEL_RUNNER_H_
