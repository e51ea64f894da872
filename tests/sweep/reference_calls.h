// Binds compute calls of each op to kernel calls, by their operands (reference_operands.h).
#ifndef RINGATTN_TESTS_SWEEP_REFERENCE_CALLS_H_
#define RINGATTN_TESTS_SWEEP_REFERENCE_CALLS_H_

#include "tests/sweep/reference_operands.h"
#include "worker/kernels/attention_kernel.h"

namespace ringattn::tests {

worker::KernelCall BindForward(Operands& operands);
worker::KernelCall BindDelta(Operands& operands);
worker::KernelCall BindSinkGradient(Operands& operands);
worker::KernelCall BindBackward(Operands& operands);
worker::KernelCall BindBiasGradient(Operands& operands);
worker::KernelCall BindMerge(Operands& operands);
worker::KernelCall BindProbabilities(Operands& operands);
worker::KernelCall BindCopy(Operands& operands);
worker::KernelCall BindGather(Operands& operands);
worker::KernelCall BindScatter(Operands& operands, bool merges);

}  // namespace ringattn::tests

#endif  // RINGATTN_TESTS_SWEEP_REFERENCE_CALLS_H_
