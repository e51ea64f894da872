#include "worker/executor/bind_call.h"

#include <cassert>
#include <variant>

#include "worker/kernels/option_operands.h"

namespace ringattn::worker {
namespace {

using Op = ComputeCall::Op;

static_assert(kNoStoreHint == ComputeCall::kNoStoreHint);

ScoreTerms TermsOf(const AttentionSpec& spec, const ShardPlan& plan, int rank) {
  const AttentionShape& shape = spec.shape;
  const AttentionOptions& options = spec.options;
  ScoreTerms terms;
  if (!HasScoreTerms(options)) return terms;
  terms.packed = shape.packed;
  for (int64_t d = 0; d < shape.num_documents(); ++d) {
    terms.shifts.push_back(shape.cu_seqlens_k[d + 1] - shape.cu_seqlens_k[d] -
                           (shape.cu_seqlens_q[d + 1] - shape.cu_seqlens_q[d]));
  }
  terms.alibi_slopes = options.alibi_slopes;
  terms.bias = options.bias;
  terms.mask = options.mask;
  terms.columns = PairColumns(shape);
  if (ShardsPairsByKeys(plan)) {
    terms.by_keys = true;
    terms.rows = shape.seq_len_q;
    terms.columns = RowsIn(plan.kv[rank]);
  }
  terms.segment_ids = options.segment_ids;
  terms.dropout = options.dropout;
  for (const DocumentPosition& place : shape.places) terms.owners.push_back(place.document);
  return terms;
}

AttentionProblem WholeProblemOf(const AttentionSpec& spec, const ShardPlan& plan, int rank) {
  const AttentionShape& shape = spec.shape;
  AttentionProblem problem;
  problem.dtype = spec.dtype;
  problem.fp32_results = spec.fp32_results;
  problem.batch = shape.batch;
  problem.num_heads = shape.num_heads;
  problem.num_kv_heads = shape.num_kv_heads;
  problem.head_dim = shape.head_dim;
  problem.head_dim_v = shape.head_dim_v;
  problem.softmax_scale = static_cast<float>(spec.options.softmax_scale);
  problem.softcap = static_cast<float>(spec.options.softcap);
  problem.deterministic = spec.options.deterministic;
  problem.compute = spec.options.compute_dtype;
  problem.bands = DocumentBands(spec);
  problem.terms = TermsOf(spec, plan, rank);
  return problem;
}

// Returns the problem restricted to some heads.
AttentionProblem OnlyHeads(const AttentionProblem& whole, const HeadRange& heads) {
  AttentionProblem problem = whole;
  const int64_t group_size = whole.num_heads / whole.num_kv_heads;
  const int64_t first = heads.begin * group_size;
  DropoutForm& dropout = problem.terms.dropout;
  problem.num_heads = heads.count * group_size;
  problem.num_kv_heads = heads.count;
  dropout.first_head += dropout.head_step * static_cast<uint32_t>(first);
  problem.terms.alibi_slopes.clear();
  for (size_t row = 0; row < whole.terms.alibi_slopes.size(); row += whole.num_heads) {
    const auto begin = whole.terms.alibi_slopes.begin() + static_cast<int64_t>(row) + first;
    problem.terms.alibi_slopes.insert(problem.terms.alibi_slopes.end(), begin,
                                      begin + problem.num_heads);
  }
  return problem;
}

// `Call` is ForwardCall, BackwardCall, BiasGradientCall or ProbabilitiesCall.
template <typename Call>
Call DescribeAttention(const BindContext& contexts, const ComputeCall& call) {
  const ProblemContext& context = contexts.Of(call);
  Call kernel_call;
  kernel_call.problem = &context.ProblemOf(call.heads);
  kernel_call.q_rows = call.q.rows();
  kernel_call.q_pieces =
      SlicePieces(context.q_pieces[call.q.source_rank], call.q.row_begin, call.q.row_end);
  for (const KvOperand& operand : call.kv) {
    KvBlock& block = kernel_call.blocks.emplace_back();
    block.rows = operand.rows();
    block.late = operand.late;
    block.pieces =
        SlicePieces(context.kv_pieces[operand.source_rank], operand.row_begin, operand.row_end);
  }
  return kernel_call;
}

absl::Span<const int32_t> HeadsOf(const DilatedPart& part, PartForm::Heads heads) {
  static constexpr int32_t kOnlyHead[] = {0};
  switch (heads) {
    case PartForm::Heads::kNone:
      return kOnlyHead;
    case PartForm::Heads::kQuery:
      return part.q_heads;
    case PartForm::Heads::kKeyValue:
      return part.kv_heads;
  }
  return {};
}

const std::vector<RowRun>& RowsOf(const BindContext& context, const DilatedPart& part,
                                  bool of_keys) {
  return (of_keys ? part.kv_rows : part.q_rows)[context.rank];
}

GatherCall DescribeGather(const BindContext& context, const ComputeCall& call) {
  const DilatedPart& part = context.dilated[call.part];
  const PartForm& form = call.form;
  GatherCall made;
  made.heads_first = form.heads_first;
  made.outer = form.outer;
  made.inner_bytes = form.inner_bytes;
  made.rows = form.rows;
  made.part_rows = form.part_rows;
  made.heads = form.heads;
  made.part_heads = form.part_heads;
  made.row_runs = RowsOf(context, part, form.of_keys);
  made.head_of = HeadsOf(part, form.heads_of);
  return made;
}

ScatterCall DescribeScatter(const BindContext& context, const ComputeCall& call) {
  const PartForm& form = call.form;
  ScatterCall made;
  made.merges = call.op == Op::kScatterMerge;
  made.heads_first = form.heads_first;
  made.initial = call.initial;
  made.final = call.final;
  made.dtype = context.whole.problem.out_dtype();
  made.outer = form.outer;
  made.rows = form.rows;
  made.heads = form.heads;
  made.width = form.inner_bytes / 4;
  for (size_t i = 0; i < call.parts.size(); ++i) {
    const DilatedPart& part = context.dilated[call.part + i];
    ScatterPart& scattered = made.parts.emplace_back();
    scattered.row_runs = RowsOf(context, part, form.of_keys);
    scattered.head_of = HeadsOf(part, form.heads_of);
    if (scattered.row_runs.empty()) continue;
    const RowRun& last = scattered.row_runs.back();
    scattered.rows = last.first + last.count;
  }
  return made;
}

// Assigns addresses to a kernel call's fields, converted to their pointer types.
class Addresses {
 public:
  explicit Addresses(absl::FunctionRef<void*(const ByteRange&)> address) : address_(address) {}

  template <typename T>
  void Set(T*& field, const ByteRange& range) const {
    field = range.buffer == kNoBuffer ? nullptr : static_cast<T*>(address_(range));
  }

 private:
  absl::FunctionRef<void*(const ByteRange&)> address_;
};

void SetBlocks(const ComputeCall& call, const Addresses& addresses, std::vector<KvBlock>& blocks) {
  for (size_t i = 0; i < call.kv.size(); ++i) {
    addresses.Set(blocks[i].k, call.kv[i].k);
    addresses.Set(blocks[i].v, call.kv[i].v);
    addresses.Set(blocks[i].dk, call.kv[i].dk);
    addresses.Set(blocks[i].dv, call.kv[i].dv);
    addresses.Set(blocks[i].dk_out, call.kv[i].dk_out);
    addresses.Set(blocks[i].dv_out, call.kv[i].dv_out);
    addresses.Set(blocks[i].segment_ids, call.kv[i].segment_ids);
  }
}

}  // namespace

ProblemContext::ProblemContext(const AttentionSpec& spec, const ShardPlan& plan, int rank,
                               const Tuning& tuning)
    : problem(WholeProblemOf(spec, plan, rank)),
      q_pieces(plan.world_size),
      kv_pieces(plan.world_size) {
  problem.tuning = tuning;
}

void ProblemContext::Add(const ComputeCall& call, const AttentionSpec& spec,
                         const ShardPlan& plan) {
  if (call.op != Op::kForward && call.op != Op::kBackward && call.op != Op::kBiasGradient &&
      call.op != Op::kProbabilities) {
    return;
  }
  if (!call.heads.all() && of_heads.count(call.heads.begin) == 0) {
    of_heads.emplace(call.heads.begin, OnlyHeads(problem, call.heads));
  }
  const int rank = call.q.source_rank;
  if (q_pieces[rank].empty()) q_pieces[rank] = QueryPieces(spec.shape, plan.q[rank]);
  for (const KvOperand& operand : call.kv) {
    std::vector<Piece>& pieces = kv_pieces[operand.source_rank];
    if (pieces.empty()) pieces = KeyPieces(spec.shape, plan.kv[operand.source_rank]);
  }
}

const AttentionProblem& ProblemContext::ProblemOf(const HeadRange& heads) const {
  return heads.all() ? problem : of_heads.at(heads.begin);
}

BindContext::BindContext(const AttentionSpec& spec, const ShardPlan& plan, const Program& program)
    : whole(spec, plan, program.rank, program.tuning), rank(program.rank) {
  if (!spec.options.dilation_levels.empty()) dilated = DilatedPartsOf(spec, plan);
  for (const DilatedPart& part : dilated) {
    parts.emplace_back(part.spec, part.plan, program.rank, program.tuning);
  }
  for (const Step& step : program.steps) {
    for (const ComputeCall& call : step.calls) {
      if (call.part == ComputeCall::kWhole) {
        whole.Add(call, spec, plan);
      } else {
        parts[call.part].Add(call, dilated[call.part].spec, dilated[call.part].plan);
      }
    }
  }
  if (spec.probability_rows.empty()) return;
  chosen = ChosenRowsOf(spec, plan, program.rank);
  probability_columns = ProbabilityColumns(spec);
}

KernelCall DescribeCall(const BindContext& context, const ComputeCall& call) {
  switch (call.op) {
    case Op::kForward: {
      auto forward = DescribeAttention<ForwardCall>(context, call);
      forward.initial = call.initial;
      forward.final = call.final;
      return forward;
    }
    case Op::kDelta: {
      DeltaCall delta;
      delta.problem = &context.Of(call).problem;
      delta.q_rows = call.q.rows();
      return delta;
    }
    case Op::kSinkGradient: {
      SinkGradientCall sinks;
      sinks.problem = &context.Of(call).problem;
      sinks.q_rows = call.q.rows();
      return sinks;
    }
    case Op::kBackward: {
      auto backward = DescribeAttention<BackwardCall>(context, call);
      backward.store_hint = call.store_hint;
      return backward;
    }
    case Op::kBiasGradient:
      return DescribeAttention<BiasGradientCall>(context, call);
    case Op::kProbabilities: {
      auto probabilities = DescribeAttention<ProbabilitiesCall>(context, call);
      probabilities.rows = context.chosen;
      probabilities.columns = context.probability_columns;
      probabilities.initial = call.initial;
      probabilities.final = call.final;
      return probabilities;
    }
    case Op::kZero:
      return ZeroCall{nullptr, call.target.bytes, call.store_hint};
    case Op::kAdd:
      return AddCall{nullptr, nullptr, call.target.bytes / 4};
    case Op::kConvert:
      return ConvertCall{context.whole.problem.dtype, nullptr, nullptr, call.source.bytes / 4,
                         call.store_hint};
    case Op::kMerge: {
      MergeCall merge;
      merge.problem = &context.Of(call).problem;
      merge.q_rows = call.q.rows();
      merge.parts.resize(call.parts.size());
      merge.final = call.final;
      return merge;
    }
    case Op::kCopy:
      return CopyCall{nullptr,
                      nullptr,
                      call.copy.runs,
                      call.copy.run_bytes,
                      call.copy.source_pitch,
                      call.copy.target_pitch};
    case Op::kGather:
      return DescribeGather(context, call);
    case Op::kScatterAdd:
    case Op::kScatterMerge:
      return DescribeScatter(context, call);
  }
  assert(false && "unknown Op");
  return ZeroCall{};
}

void SetAddresses(const ComputeCall& call, absl::FunctionRef<void*(const ByteRange&)> address,
                  KernelCall& kernel_call) {
  struct Visitor {
    const ComputeCall& call;
    const Addresses addresses;

    void operator()(ForwardCall& forward) const {
      addresses.Set(forward.q, call.q.q);
      addresses.Set(forward.out_acc, call.q.out_acc);
      addresses.Set(forward.lse, call.q.lse);
      addresses.Set(forward.out, call.q.out);
      SetBlocks(call, addresses, forward.blocks);
    }
    void operator()(DeltaCall& delta) const {
      addresses.Set(delta.out, call.q.out);
      addresses.Set(delta.dout, call.q.dout);
      addresses.Set(delta.delta, call.q.delta);
      addresses.Set(delta.lse, call.q.lse);
      addresses.Set(delta.dq_acc, call.q.dq_acc);
    }
    void operator()(SinkGradientCall& sinks) const {
      addresses.Set(sinks.lse, call.q.lse);
      addresses.Set(sinks.delta, call.q.delta);
      addresses.Set(sinks.dsinks, call.target);
    }
    void operator()(BackwardCall& backward) const {
      addresses.Set(backward.q, call.q.q);
      addresses.Set(backward.dout, call.q.dout);
      addresses.Set(backward.lse, call.q.lse);
      addresses.Set(backward.delta, call.q.delta);
      addresses.Set(backward.dq_acc, call.q.dq_acc);
      SetBlocks(call, addresses, backward.blocks);
    }
    void operator()(BiasGradientCall& bias) const {
      addresses.Set(bias.q, call.q.q);
      addresses.Set(bias.dout, call.q.dout);
      addresses.Set(bias.lse, call.q.lse);
      addresses.Set(bias.delta, call.q.delta);
      addresses.Set(bias.dbias, call.target);
      SetBlocks(call, addresses, bias.blocks);
    }
    void operator()(ProbabilitiesCall& probabilities) const {
      addresses.Set(probabilities.q, call.q.q);
      addresses.Set(probabilities.lse, call.q.lse);
      addresses.Set(probabilities.target, call.target);
      SetBlocks(call, addresses, probabilities.blocks);
    }
    void operator()(ZeroCall& zero) const { addresses.Set(zero.target, call.target); }
    void operator()(AddCall& add) const {
      addresses.Set(add.target, call.target);
      addresses.Set(add.source, call.source);
    }
    void operator()(ConvertCall& convert) const {
      addresses.Set(convert.target, call.target);
      addresses.Set(convert.source, call.source);
    }
    void operator()(MergeCall& merge) const {
      addresses.Set(merge.out_acc, call.q.out_acc);
      addresses.Set(merge.out, call.q.out);
      addresses.Set(merge.lse, call.q.lse);
      for (size_t i = 0; i < call.parts.size(); ++i) {
        addresses.Set(merge.parts[i].out, call.parts[i].out);
        addresses.Set(merge.parts[i].lse, call.parts[i].lse);
      }
    }
    void operator()(CopyCall& copy) const {
      addresses.Set(copy.target, call.target);
      addresses.Set(copy.source, call.source);
    }
    void operator()(GatherCall& gather) const {
      addresses.Set(gather.whole, call.source);
      addresses.Set(gather.part, call.target);
    }
    void operator()(ScatterCall& scatter) const {
      for (size_t i = 0; i < call.parts.size(); ++i) {
        addresses.Set(scatter.parts[i].values, call.parts[i].out);
        addresses.Set(scatter.parts[i].lse, call.parts[i].lse);
      }
      if (scatter.merges) {
        addresses.Set(scatter.values, call.q.out_acc);
        addresses.Set(scatter.result, call.q.out);
        addresses.Set(scatter.lse, call.q.lse);
        return;
      }
      addresses.Set(scatter.values, call.source);
      if (call.final) {
        addresses.Set(scatter.result, call.target);
      } else {
        addresses.Set(scatter.values, call.target);
      }
    }
  };
  std::visit(Visitor{call, Addresses(address)}, kernel_call);
  for (const OptionOperand& operand : call.q.options) {
    const bool taken = SetOptionOperand(operand.tensor, address(operand.range), kernel_call);
    assert(taken && "the schedule sets an operand that this call does not have");
    (void)taken;
  }
}

}  // namespace ringattn::worker
