#include "tests/sweep/reference_bind.h"

#include <cstdint>

#include "tests/sweep/reference_calls.h"

namespace ringattn::tests {

using namespace ringattn::worker;  // what is under test

namespace {

KernelCall BindOp(Operands& operands) {
  const ComputeCall& call = operands.call;
  const int64_t floats = call.source.bytes / 4;
  switch (call.op) {
    case ComputeCall::Op::kForward:
      return BindForward(operands);
    case ComputeCall::Op::kDelta:
      return BindDelta(operands);
    case ComputeCall::Op::kSinkGradient:
      return BindSinkGradient(operands);
    case ComputeCall::Op::kBiasGradient:
      return BindBiasGradient(operands);
    case ComputeCall::Op::kProbabilities:
      return BindProbabilities(operands);
    case ComputeCall::Op::kBackward:
      return BindBackward(operands);
    case ComputeCall::Op::kZero:
      return ZeroCall{operands.Range(call.target), call.target.bytes};
    case ComputeCall::Op::kAdd:
      return AddCall{operands.Floats(call.target, floats), operands.Floats(call.source, floats),
                     floats};
    case ComputeCall::Op::kConvert:
      return ConvertCall{operands.spec.dtype, operands.Elements(call.target, floats),
                         operands.Floats(call.source, floats), floats};
    case ComputeCall::Op::kMerge:
      return BindMerge(operands);
    case ComputeCall::Op::kCopy:
      return BindCopy(operands);
    case ComputeCall::Op::kGather:
      return BindGather(operands);
    case ComputeCall::Op::kScatterAdd:
      return BindScatter(operands, /*merges=*/false);
    case ComputeCall::Op::kScatterMerge:
      return BindScatter(operands, /*merges=*/true);
  }
  operands.Fail("an unknown op");
  return ZeroCall{};
}

}  // namespace

absl::StatusOr<KernelCall> BindReference(const ReferenceProblems& problems, ReferenceMemory& memory,
                                         CallStore& store, int rank, size_t step,
                                         const ComputeCall& call) {
  Operands operands(problems, memory, store, rank, step, call);
  KernelCall bound = BindOp(operands);
  if (!operands.error.ok()) return operands.error;
  return bound;
}

}  // namespace ringattn::tests
