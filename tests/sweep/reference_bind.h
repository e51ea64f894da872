// Binds a compute call of any op to a kernel call of the interpreter.
#ifndef RINGATTN_TESTS_SWEEP_REFERENCE_BIND_H_
#define RINGATTN_TESTS_SWEEP_REFERENCE_BIND_H_

#include <cstddef>

#include "absl/status/statusor.h"
#include "common/program/program.h"
#include "tests/sweep/reference_operands.h"
#include "worker/kernels/attention_kernel.h"

namespace ringattn::tests {

// All outlive the kernel call. INTERNAL where an operand is not what its op says.
absl::StatusOr<worker::KernelCall> BindReference(const ReferenceProblems& problems,
                                                 ReferenceMemory& memory, CallStore& store,
                                                 int rank, size_t step, const ComputeCall& call);

}  // namespace ringattn::tests

#endif  // RINGATTN_TESTS_SWEEP_REFERENCE_BIND_H_
