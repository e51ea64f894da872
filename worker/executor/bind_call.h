// Turns a program's compute call into a kernel call, in two steps: DescribeCall fills in what to
// compute, SetAddresses where the operands are. A ComputeCall names every operand, so all functions
// here are tables.
#ifndef RINGATTN_WORKER_EXECUTOR_BIND_CALL_H_
#define RINGATTN_WORKER_EXECUTOR_BIND_CALL_H_

#include <map>
#include <vector>

#include "absl/functional/function_ref.h"
#include "common/attention/attention_spec.h"
#include "common/layout/dilation.h"
#include "common/layout/shard_plan.h"
#include "common/program/program.h"
#include "worker/kernels/attention_kernel.h"

namespace ringattn::worker {

// Data that the calls of one problem share. A dilated operation has one context for each of its
// parts.
struct ProblemContext {
  // For the calls of `rank`.
  ProblemContext(const AttentionSpec& spec, const ShardPlan& plan, int rank, const Tuning& tuning);

  // Adds what `call` needs: the position spans of its operands' shards, and the problem of its
  // heads.
  void Add(const ComputeCall& call, const AttentionSpec& spec, const ShardPlan& plan);
  // Returns the problem restricted to a call's heads.
  const AttentionProblem& ProblemOf(const HeadRange& heads) const;

  AttentionProblem problem;  // all heads
  std::map<int64_t, AttentionProblem>
      of_heads;  // by first head: a program's head ranges have equal lengths
  std::vector<std::vector<Piece>> q_pieces;   // by source rank
  std::vector<std::vector<Piece>> kv_pieces;  // by source rank
};

// Data that the calls of an operation share. Kernel calls refer to it, so it must outlive them.
struct BindContext {
  BindContext(const AttentionSpec& spec, const ShardPlan& plan, const Program& program);

  const ProblemContext& Of(const ComputeCall& call) const {
    return call.part == ComputeCall::kWhole ? whole : parts[call.part];
  }

  ProblemContext whole;
  // One per part of a dilated problem.
  std::vector<ProblemContext> parts;
  std::vector<DilatedPart> dilated;
  int rank = 0;
  std::vector<ChosenRow> chosen;  // the rank's rows
  int64_t probability_columns = 0;
};

// Returns the kernel call without addresses (null).
KernelCall DescribeCall(const BindContext& context, const ComputeCall& call);

// Fills in the addresses of a kernel call that DescribeCall returned for `call`.
void SetAddresses(const ComputeCall& call, absl::FunctionRef<void*(const ByteRange&)> address,
                  KernelCall& kernel_call);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_EXECUTOR_BIND_CALL_H_
