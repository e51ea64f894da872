// From a program's compute call to the kernel call, in two steps, each done once: what
// the kernel computes on, then where it lies. Every operand stands in the call, so all
// three functions are tables.
#ifndef RINGATTN_WORKER_EXECUTOR_BIND_CALL_H_
#define RINGATTN_WORKER_EXECUTOR_BIND_CALL_H_

#include <map>
#include <vector>

#include "absl/functional/function_ref.h"
#include "common/attention/attention_spec.h"
#include "common/layout/dilation.h"
#include "common/layout/shard_plan.h"
#include "common/program/program.h"
#include "worker/executor/hazard_tracker.h"
#include "worker/kernels/attention_kernel.h"

namespace ringattn::worker {

// What the calls of one problem share: the whole one, or a part of it where it is dilated.
struct ProblemContext {
  // Of the calls of `rank`.
  ProblemContext(const AttentionSpec& spec, const ShardPlan& plan, int rank, const Tuning& tuning);

  // Adds what the call needs: pieces of the shards that its operands come from, and its heads.
  void Add(const ComputeCall& call, const AttentionSpec& spec, const ShardPlan& plan);
  // The problem of a call's heads.
  const AttentionProblem& ProblemOf(const HeadRange& heads) const;

  AttentionProblem problem;                      // of all heads
  std::map<int64_t, AttentionProblem> of_heads;  // by the first one: a program's ranges are alike
  std::vector<std::vector<Piece>> q_pieces;      // by source rank
  std::vector<std::vector<Piece>> kv_pieces;     // by source rank
};

// What the calls of an operation share: they refer to it.
struct BindContext {
  BindContext(const AttentionSpec& spec, const ShardPlan& plan, const Program& program);

  const ProblemContext& Of(const ComputeCall& call) const {
    return call.part == ComputeCall::kWhole ? whole : parts[call.part];
  }

  ProblemContext whole;
  // Of a dilated problem, and what each has of it.
  std::vector<ProblemContext> parts;
  std::vector<DilatedPart> dilated;
  int rank = 0;
  std::vector<ChosenRow> chosen;  // the rank's
  int64_t probability_columns = 0;
};

// The kernel call but for the addresses, which are null.
KernelCall DescribeCall(const BindContext& context, const ComputeCall& call);

// Fills in the addresses of the kernel call that `call` was described by.
void SetAddresses(const ComputeCall& call, absl::FunctionRef<void*(const ByteRange&)> address,
                  KernelCall& kernel_call);

// What the call reads and writes.
std::vector<Access> AccessesOf(const ComputeCall& call);
// Of these, the late keys.
std::vector<Access> LateReadsOf(const ComputeCall& call);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_EXECUTOR_BIND_CALL_H_
