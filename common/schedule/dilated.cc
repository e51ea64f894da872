#include "common/schedule/dilated.h"

#include <algorithm>
#include <cassert>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/attention/tensors.h"
#include "common/schedule/program_builder.h"
#include "common/schedule/shard_buffers.h"

namespace ringattn {
namespace {

using Op = ComputeCall::Op;

// Returns whether the part has all tokens and heads of the whole, in their order. Only its
// documents differ.
bool HasEverything(const DilatedPart& part, const AttentionSpec& whole) {
  const AttentionShape &of_part = part.spec.shape, &of_whole = whole.shape;
  return of_part.seq_len_q == of_whole.seq_len_q && of_part.num_heads == of_whole.num_heads &&
         of_part.num_kv_heads == of_whole.num_kv_heads;
}

// The parts [begin, end) of one level.
struct LevelParts {
  size_t begin = 0;
  size_t end = 0;
};

std::vector<LevelParts> LevelsOf(const std::vector<DilatedPart>& parts) {
  std::vector<LevelParts> levels;
  for (size_t part = 0; part < parts.size(); ++part) {
    if (part == 0 || parts[part].level != parts[part - 1].level) levels.push_back({part, part});
    levels.back().end = part + 1;
  }
  return levels;
}

// A part's program of one pass, and its buffers indexed by the whole's.
struct PartProgram {
  size_t part = 0;
  Program program;
  std::vector<BufferId> buffers;
  std::optional<BufferId> delta;

  BufferId Output(TensorId id) const {
    for (size_t i = 0; i < buffers.size(); ++i) {
      if (program.buffers[i].output == id) return buffers[i];
    }
    return kNoBuffer;
  }
};

using PartBuilders = std::vector<std::unique_ptr<ScheduleBuilder>>;

class DilatedRank {
 public:
  DilatedRank(const ScheduleContext& context, const DilatedRoute& route, int rank)
      : spec_(context.spec),
        plan_(context.plan),
        route_(route),
        levels_(LevelsOf(route.parts)),
        builder_(spec_, plan_, rank),
        shard_(AddShardBuffers(context.recipe.direction, context.recipe.recompute_forward, builder_,
                               Accumulates())) {}

  int64_t Forward(int64_t first) {
    if (Accumulates()) AddOutAccumulator(shard_, builder_);
    int64_t step = first;
    for (size_t level = 0; level < levels_.size(); ++level) {
      step = AddLevel(step, level, route_.forward);
    }
    if (LastIsScattered()) return step;
    AddForwardOfNoKeys(step);
    return step + 1;
  }

  void Backward(int64_t first) {
    const bool any_tokens = spec_.shape.seq_len_q > 0;
    // Rank 0 has dsinks, even without tokens.
    if (any_tokens || spec_.options.sinks) builder_.Use(first);
    ShardBuffers start = shard_;
    start.dq_acc = kNoBuffer;  // the first level's parts initialise it
    StartBackward(first, start, builder_);
    if (levels_.empty()) {
      for (BufferId none : {shard_.dq, shard_.dk, shard_.dv}) {
        builder_.AddZero(first, builder_.Whole(none));
      }
    }
    std::vector<int64_t> q_rows;
    for (const Shard& shard : plan_.q) q_rows.push_back(RowsIn(shard));
    AddUpSinkGradients(first + 1, q_rows, shard_, builder_);
    int64_t step = first + 2;
    for (size_t level = 0; level < levels_.size(); ++level) {
      step = AddLevel(step, level, route_.backward);
    }
    if (LastIsScattered() || levels_.empty()) return;
    if (spec_.result_dtype() != DType::kFloat32) builder_.Use(step);
    FinishBackward(step, shard_, builder_);
  }

  Program Finish() { return builder_.Finish(); }

 private:
  bool InPlace(size_t level) const {
    return HasEverything(route_.parts[levels_[level].begin], spec_);
  }
  // Whether the calls of the first level write their results directly to the buffers into which the
  // other levels' results are merged or added.
  bool FirstIsInPlace() const { return !levels_.empty() && InPlace(0); }
  bool LastIsScattered() const { return levels_.size() > 1 || !(levels_.empty() || InPlace(0)); }
  // Whether the results of the first and the last level differ from the whole's results.
  bool Accumulates() const { return levels_.size() > 1 || FirstIsInPlace(); }

  // Computes the results from the partial, or from no keys.
  void AddForwardOfNoKeys(int64_t step) {
    if (spec_.shape.seq_len_q > 0) builder_.Use(step);
    if (builder_.q_rows() == 0) return;
    ComputeCall call;
    call.initial = levels_.empty();
    call.final = true;
    call.q = AllQueries(builder_);
    call.q.q = builder_.Whole(shard_.q);
    if (!call.initial) call.q.out_acc = builder_.Whole(shard_.out_acc);
    call.q.lse = builder_.Whole(shard_.lse);
    AddTermOptions(builder_, call.q);
    call.q.out = builder_.Whole(shard_.out);
    AddFinalOptions(builder_, call.q);
    builder_.AddCall(step, std::move(call));
  }

  // Adds the programs of a level's parts with their copies. Returns the step after them.
  int64_t AddLevel(int64_t first, size_t level, const PartBuilders& builders) {
    const bool in_place = InPlace(level);
    std::vector<PartProgram> parts;
    size_t steps = 0;
    for (size_t part = levels_[level].begin; part < levels_[level].end; ++part) {
      parts.push_back(ProgramOf(level, part, *builders[part]));
      steps = std::max(steps, parts.back().program.steps.size());
    }
    if (!in_place) {
      builder_.Use(first);
      // Keys first, because they travel.
      for (const bool of_keys : {true, false}) {
        for (const PartProgram& part : parts) AddGathers(first, part, of_keys);
      }
    }
    for (size_t i = 0; i < steps; ++i) {
      for (PartProgram& part : parts) {
        if (i < part.program.steps.size()) {
          AddStep(first + 1 + static_cast<int64_t>(i), part, std::move(part.program.steps[i]));
        }
      }
    }
    const auto last = first + 1 + static_cast<int64_t>(steps);
    if (level == 0 && in_place) return last;
    builder_.Use(last);
    AddResults(last, level, parts);
    return last + 1;
  }

  PartProgram ProgramOf(size_t level, size_t part, ScheduleBuilder& part_builder) {
    PartProgram made;
    made.part = part;
    made.program = part_builder.MakeProgram(builder_.rank());
    made.delta = TakeDelta(made.program);
    made.buffers.assign(made.program.buffers.size(), kNoBuffer);
    for (size_t i = 0; i < made.buffers.size(); ++i) {
      const BufferSpec& buffer = made.program.buffers[i];
      // Only delta needs it, and the whole has delta.
      if (buffer.input == TensorId::kOut) continue;
      BufferId& taken = made.buffers[i];
      if (InPlace(level)) {
        taken = WholeBufferFor(level, buffer, made.delta == static_cast<BufferId>(i));
      }
      if (taken == kNoBuffer) taken = PartBuffer(part - levels_[level].begin, buffer);
    }
    return made;
  }

  // Returns the whole's buffer that a part with all tokens and heads uses for this input or for the
  // first level's results; kNoBuffer for others.
  BufferId WholeBufferFor(size_t level, const BufferSpec& buffer, bool is_delta) {
    if (is_delta) return shard_.delta;
    if (buffer.input.has_value()) {
      const BufferId whole = WholeBufferOf(*buffer.input);
      builder_.First(whole, buffer.bytes);
      return whole;
    }
    if (level != 0 || !buffer.output.has_value()) return kNoBuffer;
    return *buffer.output == TensorId::kLse ? shard_.lse : AccumulatorOf(*buffer.output);
  }

  BufferId AccumulatorOf(TensorId output) const {
    switch (output) {
      case TensorId::kOut:
        return shard_.out_acc;
      case TensorId::kDq:
        return shard_.dq_acc;
      case TensorId::kDk:
        return shard_.dk_acc;
      case TensorId::kDv:
        return shard_.dv_acc;
      case TensorId::kDbias:
        return shard_.dbias;
      default:
        return kNoBuffer;
    }
  }

  // Removes the part's kDelta call from its program, because delta is gathered, but keeps the zeros
  // that the call would write. Returns the buffer of delta if there is one.
  static std::optional<BufferId> TakeDelta(Program& program) {
    std::optional<BufferId> delta;
    for (Step& step : program.steps) {
      const auto found =
          std::find_if(step.calls.begin(), step.calls.end(),
                       [](const ComputeCall& call) { return call.op == Op::kDelta; });
      if (found == step.calls.end()) continue;
      delta = found->q.delta.buffer;
      ComputeCall zero;
      zero.op = Op::kZero;
      zero.target = found->q.dq_acc;
      *found = std::move(zero);
    }
    return delta;
  }

  // `number`: index of the part in its level.
  BufferId PartBuffer(size_t number, const BufferSpec& buffer) {
    const std::string name = absl::StrCat("part", number, ".", buffer.name);
    const auto [found, is_new] = part_buffers_.try_emplace(name, kNoBuffer);
    if (is_new) {
      found->second = builder_.AddBuffer(name, buffer.bytes);
    } else {
      builder_.First(found->second, buffer.bytes);
    }
    return found->second;
  }

  void MakePartCall(size_t part, ComputeCall& call) const {
    call.part = static_cast<int>(part);
    call.part_query_heads = route_.parts[part].spec.shape.num_heads;
    call.of_query_heads = spec_.shape.num_heads;
  }

  void AddStep(int64_t at, const PartProgram& part, Step step) {
    builder_.Use(at);
    const auto move = [&](ByteRange& range) {
      if (range.buffer != kNoBuffer) range.buffer = part.buffers[range.buffer];
    };
    for (Transfer& transfer : step.transfers) {
      move(transfer.range);
      builder_.AddTransfer(at, transfer);
    }
    bool late = false;
    for (ComputeCall& call : step.calls) {
      assert(call.store_hint == ComputeCall::kNoStoreHint);  // results of a part are fp32
      ForEachRange(call, move);
      MakePartCall(part.part, call);
      // Calls that wait for other ranks follow all parts' calls, as they do in a program of one
      // part.
      late = late || call.op == Op::kAdd || call.op == Op::kMerge;
      if (late) {
        builder_.AddLateCall(at, std::move(call));
      } else {
        builder_.AddCall(at, std::move(call));
      }
    }
  }

  // Returns how the rank's shard of a part's tensor maps to its shard of the whole's tensor.
  PartForm FormOf(size_t number, TensorId id) const {
    const DilatedPart& part = route_.parts[number];
    const TensorInfo& info = InfoOf(id);
    const TensorLayout layout = LayoutOf(spec_, plan_, id);
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
    // A layout's inner bytes include all heads for kRows; for other forms `outer` includes them.
    form.outer = form.heads_first ? layout.outer / form.heads : layout.outer;
    form.inner_bytes = form.heads_first ? layout.inner_bytes : layout.inner_bytes / form.heads;
    return form;
  }

  // Returns false for a bias or a mask that all heads share.
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
        return builder_.InputOf(id);  // present in some requests only
    }
  }

  // Gathers the inputs of one axis.
  void AddGathers(int64_t step, const PartProgram& part, bool of_keys) {
    for (size_t i = 0; i < part.buffers.size(); ++i) {
      const std::optional<TensorId>& input = part.program.buffers[i].input;
      if (!input.has_value() || part.buffers[i] == kNoBuffer) continue;
      if ((InfoOf(*input).axis == Axis::kKv) != of_keys) continue;
      AddGather(step, part.part, *input, WholeBufferOf(*input), part.buffers[i]);
    }
    if (part.delta.has_value() && !of_keys) {
      AddGather(step, part.part, TensorId::kLse, shard_.delta, part.buffers[*part.delta]);
    }
  }

  void AddGather(int64_t step, size_t part, TensorId id, BufferId source, BufferId target) {
    ComputeCall call;
    call.op = Op::kGather;
    call.form = FormOf(part, id);
    if (call.form.part_bytes() == 0) return;
    MakePartCall(part, call);
    call.source = {source, 0, call.form.whole_bytes()};
    call.target = {target, 0, call.form.part_bytes()};
    builder_.AddCall(step, std::move(call));
  }

  void AddResults(int64_t step, size_t level, const std::vector<PartProgram>& parts) {
    for (const auto& [id, result] :
         {std::pair{TensorId::kOut, shard_.out}, std::pair{TensorId::kDq, shard_.dq},
          std::pair{TensorId::kDk, shard_.dk}, std::pair{TensorId::kDv, shard_.dv},
          std::pair{TensorId::kDbias, shard_.dbias}}) {
      if (parts[0].Output(id) != kNoBuffer) AddScatter(step, level, parts, id, result);
    }
  }

  // Returns the form of a result, which parts hold in fp32.
  PartForm ResultForm(size_t part, TensorId id) const {
    PartForm form = FormOf(part, id);
    form.inner_bytes = form.inner_bytes / ElementBytes(DTypeOf(spec_, id)) * 4;
    return form;
  }

  void AddScatter(int64_t step, size_t level, const std::vector<PartProgram>& parts, TensorId id,
                  BufferId result) {
    const bool merges = id == TensorId::kOut;
    ComputeCall call;
    call.op = merges ? Op::kScatterMerge : Op::kScatterAdd;
    // The bias's gradient is zeroed before the first level and has its final type from the start.
    call.initial = level == 0 && id != TensorId::kDbias;
    call.final = level + 1 == levels_.size() && id != TensorId::kDbias;
    bool any_rows = call.initial || call.final;
    for (const PartProgram& part : parts) {
      const PartForm form = ResultForm(part.part, id);
      any_rows = any_rows || form.part_bytes() > 0;
      PartialOperand& operand = call.parts.emplace_back();
      operand.out = {part.Output(id), 0, form.part_bytes()};
      if (!merges) continue;
      operand.lse = {part.Output(TensorId::kLse), 0,
                     FormOf(part.part, TensorId::kLse).part_bytes()};
    }
    MakePartCall(parts[0].part, call);
    call.form = ResultForm(parts[0].part, id);
    call.form.part_rows = call.form.part_heads = 0;
    if (call.form.whole_bytes() == 0 || !any_rows) return;
    const BufferId accumulator = AccumulatorOf(id);
    const ByteRange sum =
        call.initial && call.final ? kNone : ByteRange{accumulator, 0, call.form.whole_bytes()};
    const ByteRange rounded = builder_.Whole(result);
    if (merges) {
      call.q = AllQueries(builder_);
      call.q.out_acc = sum;
      call.q.lse = builder_.Whole(shard_.lse);
      if (call.final) {
        call.q.out = rounded;
        AddFinalOptions(builder_, call.q);
      }
    } else {
      if (!call.initial) call.source = sum;
      call.target = call.final ? rounded : sum;
    }
    builder_.AddCall(step, std::move(call));
  }

  const AttentionSpec& spec_;
  const ShardPlan& plan_;
  const DilatedRoute& route_;
  const std::vector<LevelParts> levels_;
  ProgramBuilder builder_;
  ShardBuffers shard_;
  std::map<std::string, BufferId> part_buffers_;  // by name
};

}  // namespace

bool DilatedRoute::direct() const {
  const auto is_direct = [](const std::unique_ptr<ScheduleBuilder>& part) {
    return part->direct();
  };
  return std::any_of(forward.begin(), forward.end(), is_direct) ||
         std::any_of(backward.begin(), backward.end(), is_direct);
}

DilatedRoute MakeDilatedRoute(const ScheduleContext& context) {
  const ProgramRecipe& recipe = context.recipe;
  const bool backward = recipe.direction == Direction::kBackward;
  DilatedRoute route;
  route.parts = DilatedPartsOf(context.spec, context.plan);
  for (const DilatedPart& part : route.parts) {
    const auto add = [&](Direction pass, std::vector<std::unique_ptr<ScheduleBuilder>>& builders) {
      ProgramRecipe of_part = recipe;
      of_part.direction = pass;
      of_part.recompute_forward = false;
      // Other parts read the whole's inputs too.
      of_part.keeps_inputs = HasEverything(part, context.spec);
      of_part.heads_per_step = 0;
      builders.push_back(std::make_unique<ScheduleBuilder>(
          part.spec, part.plan, of_part, [latch = context.latch] { return latch->Poll(); }));
    };
    if (!backward || recipe.recompute_forward) add(Direction::kForward, route.forward);
    if (backward) add(Direction::kBackward, route.backward);
  }
  return route;
}

Program MakeDilatedProgram(const ScheduleContext& context, const DilatedRoute& route, int rank) {
  const ProgramRecipe& recipe = context.recipe;
  const bool backward = recipe.direction == Direction::kBackward;
  DilatedRank dilated(context, route, rank);
  int64_t steps = 0;
  if (!backward || recipe.recompute_forward) steps = dilated.Forward(0);
  if (backward) dilated.Backward(steps);
  return dilated.Finish();
}

}  // namespace ringattn
