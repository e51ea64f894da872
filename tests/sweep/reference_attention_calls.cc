// Binders of what computes attention.
#include <algorithm>

#include "tests/sweep/reference_calls.h"
#include "tests/sweep/reference_parts.h"

namespace ringattn::tests {

using namespace ringattn::worker;  // what is under test

KernelCall BindForward(Operands& operands) {
  const ComputeCall& call = operands.call;
  ForwardCall forward;
  forward.problem = operands.Problem();
  forward.q_rows = call.q.rows();
  forward.q_pieces = operands.QPieces();
  forward.q = operands.Elements(call.q.q, operands.q_elements);
  forward.blocks = operands.Blocks(false);
  forward.terms = operands.Terms();
  forward.initial = call.initial;
  forward.final = call.final;
  if (!(call.initial && call.final)) {
    forward.out_acc = operands.Floats(call.q.out_acc, operands.out_elements);
  }
  forward.lse = operands.Floats(call.q.lse, operands.statistics);
  if (call.final) forward.out = operands.Results(call.q.out, operands.out_elements);
  if (call.final && operands.spec.options.sinks) forward.sinks = operands.Sinks();
  return forward;
}

KernelCall BindDelta(Operands& operands) {
  const ComputeCall& call = operands.call;
  DeltaCall delta;
  delta.problem = &operands.whole_problem;
  delta.q_rows = call.q.rows();
  delta.out = operands.Results(call.q.out, operands.out_elements);
  delta.dout = operands.Elements(call.q.dout, operands.out_elements);
  delta.delta = operands.Floats(call.q.delta, operands.statistics);
  if (call.q.dq_acc.bytes > 0) {
    delta.dq_acc = operands.Floats(call.q.dq_acc, operands.q_elements);
  }
  if (operands.spec.has_dlse) {
    delta.dlse = operands.Floats(call.q.Option(TensorId::kDlse), operands.statistics);
    delta.lse = operands.Floats(call.q.lse, operands.statistics);
  }
  return delta;
}

KernelCall BindSinkGradient(Operands& operands) {
  const ComputeCall& call = operands.call;
  SinkGradientCall sinks;
  sinks.problem = &operands.whole_problem;
  sinks.q_rows = call.q.rows();
  sinks.sinks = operands.Sinks();
  sinks.lse = operands.Floats(call.q.lse, operands.statistics);
  sinks.delta = operands.Floats(call.q.delta, operands.statistics);
  sinks.dsinks = operands.Floats(call.target, operands.spec.shape.num_heads);
  return sinks;
}

KernelCall BindBackward(Operands& operands) {
  const ComputeCall& call = operands.call;
  BackwardCall backward;
  backward.problem = operands.Problem();
  backward.q_rows = call.q.rows();
  backward.q_pieces = operands.QPieces();
  backward.q = operands.Elements(call.q.q, operands.q_elements);
  backward.dout = operands.Elements(call.q.dout, operands.out_elements);
  backward.lse = operands.Floats(call.q.lse, operands.statistics);
  backward.delta = operands.Floats(call.q.delta, operands.statistics);
  backward.dq_acc = operands.Floats(call.q.dq_acc, operands.q_elements);
  backward.blocks = operands.Blocks(true);
  backward.terms = operands.Terms();
  return backward;
}

KernelCall BindBiasGradient(Operands& operands) {
  const ComputeCall& call = operands.call;
  BiasGradientCall bias;
  bias.problem = operands.Problem();
  bias.q_rows = call.q.rows();
  bias.q_pieces = operands.QPieces();
  bias.q = operands.Elements(call.q.q, operands.q_elements);
  bias.dout = operands.Elements(call.q.dout, operands.out_elements);
  bias.lse = operands.Floats(call.q.lse, operands.statistics);
  bias.delta = operands.Floats(call.q.delta, operands.statistics);
  bias.blocks = operands.Blocks(false);
  bias.terms = operands.Terms();
  bias.dbias = operands.Exactly(call.target, operands.BiasBytes());
  return bias;
}

KernelCall BindMerge(Operands& operands) {
  const ComputeCall& call = operands.call;
  MergeCall merge;
  merge.problem = &operands.whole_problem;
  merge.q_rows = call.q.rows();
  if (call.parts.empty()) operands.Fail("a merge of nothing");
  for (const PartialOperand& part : call.parts) {
    merge.parts.push_back({operands.Floats(part.out, operands.out_elements),
                           operands.Floats(part.lse, operands.statistics)});
  }
  merge.final = call.final;
  merge.lse = operands.Floats(call.q.lse, operands.statistics);
  if (!call.final) merge.out_acc = operands.Floats(call.q.out_acc, operands.out_elements);
  if (call.final) merge.out = operands.Results(call.q.out, operands.out_elements);
  if (call.final && operands.spec.options.sinks) merge.sinks = operands.Sinks();
  return merge;
}

KernelCall BindProbabilities(Operands& operands) {
  const ComputeCall& call = operands.call;
  ProbabilitiesCall made;
  made.problem = &operands.whole_problem;
  made.q_rows = call.q.rows();
  made.q_pieces = operands.QPieces();
  made.q = operands.Elements(call.q.q, operands.q_elements);
  made.blocks = operands.Blocks(false, /*with_values=*/false);
  made.terms = operands.Terms();
  made.initial = call.initial;
  made.final = call.final;
  const AttentionShape& shape = operands.spec.shape;
  // By the definition: whose row each query is.
  const std::vector<int64_t> tokens = TokensOf(operands.problems.plan().q[operands.rank]);
  for (const ProbabilityRow& row : operands.spec.probability_rows) {
    const int64_t keys = shape.packed
                             ? shape.cu_seqlens_k[row.batch + 1] - shape.cu_seqlens_k[row.batch]
                             : shape.seq_len_kv;
    made.columns = std::max(made.columns, keys);
    const int64_t token = (shape.packed ? shape.cu_seqlens_q[row.batch] : 0) + row.position;
    const auto found = std::find(tokens.begin(), tokens.end(), token);
    if (found == tokens.end()) continue;
    made.rows.push_back({shape.packed ? 0 : row.batch, found - tokens.begin()});
  }
  const auto rows = static_cast<int64_t>(made.rows.size());
  made.target = operands.Floats(call.target, rows * shape.num_heads * made.columns);
  if (call.final) made.lse = operands.Floats(call.q.lse, operands.statistics);
  return made;
}

}  // namespace ringattn::tests
