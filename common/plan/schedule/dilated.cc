#include "common/plan/schedule/dilated.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/attention/tensors.h"
#include "common/plan/schedule/program_builder.h"
#include "common/plan/schedule/shard_buffers.h"

namespace ringattn {
namespace {

using Op = ComputeCall::Op;

// Has all tokens and heads of the whole, in their order: its documents alone are others.
bool HasEverything(const DilatedPart& part, const AttentionSpec& whole) {
  const AttentionShape &of_part = part.spec.shape, &of_whole = whole.shape;
  return of_part.seq_len_q == of_whole.seq_len_q && of_part.num_heads == of_whole.num_heads &&
         of_part.num_kv_heads == of_whole.num_kv_heads;
}

class DilatedRank {
 public:
  DilatedRank(const AttentionSpec& spec, const ShardPlan& plan, Direction direction,
              bool recompute_forward, const DilatedRoute& route, int rank)
      : spec_(spec),
        plan_(plan),
        route_(route),
        builder_(spec, plan, rank),
        shard_(AddShardBuffers(direction, recompute_forward, builder_)) {}

  int64_t Forward(int64_t first) {
    AddOutAccumulator(shard_, builder_);
    int64_t step = first;
    if (!FirstMakesPartial()) AddForwardOfNoKeys(step++, /*initial=*/true);
    for (size_t part = 0; part < route_.parts.size(); ++part) {
      step = AddPart(step, part, *route_.forward[part]);
    }
    AddForwardOfNoKeys(step, /*initial=*/false);
    return step + 1;
  }

  void Backward(int64_t first) {
    const bool any_tokens = spec_.shape.seq_len_q > 0;
    // Rank 0 has dsinks, also of no tokens.
    if (any_tokens || spec_.options.sinks) builder_.Use(first);
    StartBackward(first, shard_, builder_);
    builder_.AddZero(first, builder_.Whole(shard_.dk_acc));
    builder_.AddZero(first, builder_.Whole(shard_.dv_acc));
    std::vector<int64_t> q_rows;
    for (const Shard& shard : plan_.q) q_rows.push_back(RowsIn(shard));
    AddUpSinkGradients(first + 1, q_rows, shard_, builder_);
    int64_t step = first + 2;
    for (size_t part = 0; part < route_.parts.size(); ++part) {
      step = AddPart(step, part, *route_.backward[part]);
    }
    if (any_tokens && spec_.result_dtype() != DType::kFloat32) builder_.Use(step);
    FinishBackward(step, shard_, builder_);
  }

  Program Finish() { return builder_.Finish(); }

 private:
  bool FirstMakesPartial() const {
    return !route_.parts.empty() && HasEverything(route_.parts[0], spec_);
  }

  // Makes the partial (0, -inf) of every row, or the results from it.
  void AddForwardOfNoKeys(int64_t step, bool initial) {
    if (spec_.shape.seq_len_q > 0) builder_.Use(step);
    if (builder_.q_rows() == 0) return;
    ComputeCall call;
    call.initial = initial;
    call.final = !initial;
    call.q = AllQueries(builder_);
    call.q.q = builder_.Whole(shard_.q);
    call.q.out_acc = builder_.Whole(shard_.out_acc);
    call.q.lse = builder_.Whole(shard_.lse);
    AddTermOptions(builder_, call.q);
    if (call.final) {
      call.q.out = builder_.Whole(shard_.out);
      AddFinalOptions(builder_, call.q);
    }
    builder_.AddCall(step, std::move(call));
  }

  // One part's program with its copies. Returns the step behind it.
  int64_t AddPart(int64_t first, size_t part, ScheduleBuilder& part_builder) {
    Program program = part_builder.MakeProgram(builder_.rank());
    const std::optional<BufferId> delta = TakeDelta(program);
    const bool in_place = HasEverything(route_.parts[part], spec_);
    std::vector<BufferId> buffers(program.buffers.size(), kNoBuffer);
    for (size_t i = 0; i < buffers.size(); ++i) {
      const BufferSpec& buffer = program.buffers[i];
      // Only for delta, which the whole has.
      if (buffer.input == TensorId::kOut) continue;
      if (in_place) buffers[i] = WholeBufferFor(part, buffer, delta == static_cast<BufferId>(i));
      if (buffers[i] == kNoBuffer) buffers[i] = PartBuffer(part, buffer);
    }
    const auto last = first + 1 + static_cast<int64_t>(program.steps.size());
    if (!in_place) builder_.Use(first);
    const bool makes_partial = part == 0 && in_place && IsForward(program);
    if (!makes_partial) builder_.Use(last);
    for (size_t i = 0; i < buffers.size() && !in_place; ++i) {
      if (program.buffers[i].input.has_value() && buffers[i] != kNoBuffer) {
        AddGather(first, part, *program.buffers[i].input, buffers[i]);
      }
    }
    if (delta.has_value() && !in_place) {
      AddGather(first, part, TensorId::kLse, buffers[*delta], shard_.delta);
    }
    for (size_t i = 0; i < program.steps.size(); ++i) {
      AddStep(first + 1 + static_cast<int64_t>(i), part, std::move(program.steps[i]), buffers);
    }
    if (!makes_partial) AddResults(last, part, program, buffers);
    return last + 1;
  }

  static bool IsForward(const Program& program) {
    return std::any_of(program.buffers.begin(), program.buffers.end(),
                       [](const BufferSpec& buffer) { return buffer.output == TensorId::kOut; });
  }

  // Where a part that has everything finds its input, or leaves the partial; kNoBuffer of others.
  BufferId WholeBufferFor(size_t part, const BufferSpec& buffer, bool is_delta) {
    if (is_delta) return shard_.delta;
    if (buffer.input.has_value()) {
      const BufferId whole = WholeBufferOf(*buffer.input);
      builder_.First(whole, buffer.bytes);
      return whole;
    }
    if (part != 0) return kNoBuffer;
    if (buffer.output == TensorId::kOut) return shard_.out_acc;
    return buffer.output == TensorId::kLse ? shard_.lse : kNoBuffer;
  }

  // Takes the part's own delta out of its program: it is gathered. Its buffer, if there is one.
  static std::optional<BufferId> TakeDelta(Program& program) {
    std::optional<BufferId> delta;
    for (Step& step : program.steps) {
      const auto found =
          std::find_if(step.calls.begin(), step.calls.end(),
                       [](const ComputeCall& call) { return call.op == Op::kDelta; });
      if (found == step.calls.end()) continue;
      delta = found->q.delta.buffer;
      step.calls.erase(found);
    }
    return delta;
  }

  BufferId PartBuffer(size_t part, const BufferSpec& buffer) {
    const std::string name = absl::StrCat("part", part % 2, ".", buffer.name);
    for (const auto& [id, taken] : part_buffers_) {
      if (taken != name) continue;
      builder_.First(id, buffer.bytes);
      return id;
    }
    const BufferId id = builder_.AddBuffer(name, buffer.bytes);
    part_buffers_.emplace_back(id, name);
    return id;
  }

  void MakePartCall(size_t part, ComputeCall& call) const {
    call.part = static_cast<int>(part);
    call.part_query_heads = route_.parts[part].spec.shape.num_heads;
    call.of_query_heads = spec_.shape.num_heads;
  }

  void AddStep(int64_t at, size_t part, Step step, const std::vector<BufferId>& buffers) {
    builder_.Use(at);
    const auto move = [&](ByteRange& range) {
      if (range.buffer != kNoBuffer) range.buffer = buffers[range.buffer];
    };
    for (Transfer& transfer : step.transfers) {
      move(transfer.range);
      builder_.AddTransfer(at, transfer);
    }
    for (ComputeCall& call : step.calls) {
      for (ByteRange* range : {&call.q.q, &call.q.out_acc, &call.q.out, &call.q.lse, &call.q.dout,
                               &call.q.delta, &call.q.dq_acc, &call.source, &call.target}) {
        move(*range);
      }
      for (OptionOperand& option : call.q.options) move(option.range);
      for (KvOperand& keys : call.kv) {
        for (ByteRange* range : {&keys.k, &keys.v, &keys.dk, &keys.dv, &keys.segment_ids}) {
          move(*range);
        }
      }
      for (PartialOperand& partial : call.parts) {
        move(partial.out);
        move(partial.lse);
      }
      MakePartCall(part, call);
      builder_.AddCall(at, std::move(call));
    }
  }

  // How the rank's part of a tensor lies in its shard of the whole's.
  PartForm FormOf(size_t number, TensorId id) const {
    const DilatedPart& part = route_.parts[number];
    const TensorInfo& info = InfoOf(id);
    const TensorLayout layout = LayoutOf(spec_, id);
    PartForm form;
    form.of_keys = info.axis == Axis::kKv;
    form.rows = form.of_keys ? builder_.kv_rows() : builder_.q_rows();
    const ShardPlan& plan = part.plan;
    form.part_rows = RowsIn((form.of_keys ? plan.kv : plan.q)[builder_.rank()]);
    form.heads_first = info.form == TensorForm::kStatistics || info.form == TensorForm::kPairs;
    form.heads_of =
        info.heads == HeadsOf::kKeyValue ? PartForm::Heads::kKeyValue : PartForm::Heads::kQuery;
    if (info.form == TensorForm::kPerToken || !HasHeads(id)) form.heads_of = PartForm::Heads::kNone;
    if (form.heads_of != PartForm::Heads::kNone) {
      const bool of_keys = form.heads_of == PartForm::Heads::kKeyValue;
      form.heads = of_keys ? spec_.shape.num_kv_heads : spec_.shape.num_heads;
      form.part_heads = of_keys ? part.spec.shape.num_kv_heads : part.spec.shape.num_heads;
    }
    // Of kRows a layout's inner bytes have all heads, of the others its outer.
    form.outer = form.heads_first ? layout.outer / form.heads : layout.outer;
    form.inner_bytes = form.heads_first ? layout.inner_bytes : layout.inner_bytes / form.heads;
    return form;
  }

  // False of a bias or a mask that is one for all heads.
  bool HasHeads(TensorId id) const {
    if (id == TensorId::kMask) return spec_.options.mask->per_head;
    if (id == TensorId::kBias || id == TensorId::kDbias) return spec_.options.bias->per_head;
    return true;
  }

  BufferId WholeBufferOf(TensorId id) const {
    switch (id) {
      case TensorId::kQ:
        return shard_.q;
      case TensorId::kK:
        return shard_.k;
      case TensorId::kV:
        return shard_.v;
      case TensorId::kLse:
        return shard_.lse;
      case TensorId::kDout:
        return shard_.dout;
      default:
        return builder_.InputOf(id);  // what only some requests have
    }
  }

  void AddGather(int64_t step, size_t part, TensorId id, BufferId target,
                 BufferId source = kNoBuffer) {
    ComputeCall call;
    call.op = Op::kGather;
    call.form = FormOf(part, id);
    if (call.form.part_bytes() == 0) return;
    MakePartCall(part, call);
    call.source = {source == kNoBuffer ? WholeBufferOf(id) : source, 0, call.form.whole_bytes()};
    call.target = {target, 0, call.form.part_bytes()};
    builder_.AddCall(step, std::move(call));
  }

  void AddResults(int64_t step, size_t part, const Program& program,
                  const std::vector<BufferId>& buffers) {
    const auto output = [&](TensorId id) {
      for (size_t i = 0; i < buffers.size(); ++i) {
        if (program.buffers[i].output == id) return buffers[i];
      }
      return kNoBuffer;
    };
    if (output(TensorId::kOut) != kNoBuffer) {
      AddMerge(step, part, output(TensorId::kOut), output(TensorId::kLse));
    }
    for (const auto& [id, sum] :
         {std::pair{TensorId::kDq, shard_.dq_acc}, std::pair{TensorId::kDk, shard_.dk_acc},
          std::pair{TensorId::kDv, shard_.dv_acc}, std::pair{TensorId::kDbias, shard_.dbias}}) {
      if (output(id) != kNoBuffer) AddSum(step, part, id, output(id), sum);
    }
  }

  // Of a result, which a part has in fp32.
  PartForm ResultForm(size_t part, TensorId id) const {
    PartForm form = FormOf(part, id);
    form.inner_bytes = form.inner_bytes / ElementBytes(DTypeOf(spec_, id)) * 4;
    return form;
  }

  void AddMerge(int64_t step, size_t part, BufferId out, BufferId lse) {
    ComputeCall call;
    call.op = Op::kScatterMerge;
    call.form = ResultForm(part, TensorId::kOut);
    if (call.form.part_bytes() == 0) return;
    MakePartCall(part, call);
    const PartForm statistics = FormOf(part, TensorId::kLse);
    call.q = AllQueries(builder_);
    call.q.out_acc = {shard_.out_acc, 0, call.form.whole_bytes()};
    call.q.lse = {shard_.lse, 0, statistics.whole_bytes()};
    call.parts.push_back({{out, 0, call.form.part_bytes()}, {lse, 0, statistics.part_bytes()}});
    builder_.AddCall(step, std::move(call));
  }

  void AddSum(int64_t step, size_t part, TensorId id, BufferId source, BufferId target) {
    ComputeCall call;
    call.op = Op::kScatterAdd;
    call.form = ResultForm(part, id);
    if (call.form.part_bytes() == 0) return;
    MakePartCall(part, call);
    call.source = {source, 0, call.form.part_bytes()};
    call.target = {target, 0, call.form.whole_bytes()};
    builder_.AddCall(step, std::move(call));
  }

  const AttentionSpec& spec_;
  const ShardPlan& plan_;
  const DilatedRoute& route_;
  ProgramBuilder builder_;
  ShardBuffers shard_;
  std::vector<std::pair<BufferId, std::string>> part_buffers_;
};

}  // namespace

bool DilatedRoute::direct() const {
  const auto is_direct = [](const std::unique_ptr<ScheduleBuilder>& part) {
    return part->direct();
  };
  return std::any_of(forward.begin(), forward.end(), is_direct) ||
         std::any_of(backward.begin(), backward.end(), is_direct);
}

DilatedRoute MakeDilatedRoute(const AttentionSpec& spec, const ShardPlan& plan, ScheduleKind kind,
                              Direction direction, bool recompute_forward, CancelLatch* latch) {
  DilatedRoute route;
  route.parts = DilatedPartsOf(spec, plan);
  for (const DilatedPart& part : route.parts) {
    // The whole's inputs are other parts', too.
    const bool keeps_inputs = HasEverything(part, spec);
    const auto add = [&](Direction pass, std::vector<std::unique_ptr<ScheduleBuilder>>& builders) {
      builders.push_back(std::make_unique<ScheduleBuilder>(
          part.spec, part.plan, kind, pass, /*recompute_forward=*/false,
          [latch] { return latch->Ask(); }, keeps_inputs));
    };
    if (direction == Direction::kForward || recompute_forward) {
      add(Direction::kForward, route.forward);
    }
    if (direction == Direction::kBackward) add(Direction::kBackward, route.backward);
  }
  return route;
}

Program MakeDilatedProgram(const AttentionSpec& spec, const ShardPlan& plan, Direction direction,
                           bool recompute_forward, const DilatedRoute& route, int rank) {
  DilatedRank dilated(spec, plan, direction, recompute_forward, route, rank);
  int64_t steps = 0;
  if (direction == Direction::kForward || recompute_forward) steps = dilated.Forward(0);
  if (direction == Direction::kBackward) dilated.Backward(steps);
  return dilated.Finish();
}

}  // namespace ringattn
