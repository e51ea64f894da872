#include "tests/sweep/reference_interpreter.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/plan/dilation.h"
#include "tests/sweep/poisoned_buffer.h"
#include "tests/sweep/reference_parts.h"

namespace ringattn::tests {
namespace {

absl::Status Broken(int rank, size_t step, const std::string& reason) {
  return absl::InternalError(absl::StrCat("rank ", rank, ", step ", step, ": ", reason));
}

class Interpreter {
 public:
  Interpreter(const AttentionSpec& spec, const ShardPlan& plan, const Schedule& schedule,
              const Kernels& kernels, Cut cut)
      : spec_(spec),
        plan_(plan),
        schedule_(schedule),
        kernels_(kernels),
        cut_(cut),
        problem_(ReferenceProblemOf(spec)) {
    if (!schedule.programs.empty()) problem_.tuning = schedule.programs[0].tuning;
    parts_ = ReferencePartsOf(spec, plan, problem_);
    if (cut == Cut::kPieces) CutPartsIntoPieces();
  }

  absl::StatusOr<TensorMap> Run(const TensorMap& inputs) {
    if (static_cast<int>(schedule_.programs.size()) != plan_.world_size) {
      return absl::InternalError("the schedule has not one program per rank");
    }
    size_t steps = 0;
    for (int rank = 0; rank < plan_.world_size; ++rank) {
      const Program& program = schedule_.programs[rank];
      steps = std::max(steps, program.steps.size());
      buffers_.emplace_back();
      for (const BufferSpec& buffer : program.buffers) buffers_.back().emplace_back(buffer.bytes);
      for (size_t id = 0; id < program.buffers.size(); ++id) {
        const BufferSpec& buffer = program.buffers[id];
        if (!buffer.input.has_value()) continue;
        absl::Status status = CopyShard(rank, id, *buffer.input,
                                        const_cast<uint8_t*>(inputs.at(*buffer.input).data()),
                                        /*to_buffer=*/true);
        if (!status.ok()) return status;
      }
    }
    for (size_t step = 0; step < steps; ++step) {
      absl::Status status = Exchange(step);
      for (int rank = 0; rank < plan_.world_size && status.ok(); ++rank) {
        status = Compute(rank, step);
      }
      if (!status.ok()) return status;
    }
    return Collect(steps);
  }

 private:
  void CutPartsIntoPieces() {
    const std::vector<DilatedPart> parts = DilatedPartsOf(spec_, plan_);
    for (size_t i = 0; i < parts_.size(); ++i) {
      const AttentionShape& shape = parts.at(i).spec.shape;
      for (int rank = 0; rank < plan_.world_size; ++rank) {
        parts_[i].q[rank].pieces = QueryPieces(shape, parts[i].plan.q[rank]);
        parts_[i].kv[rank].pieces = KeyPieces(shape, parts[i].plan.kv[rank]);
      }
    }
  }

  // --- Whole tensors and shards ---------------------------------------------

  absl::Status CopyShard(int rank, size_t id, TensorId tensor, uint8_t* whole, bool to_buffer) {
    const TensorLayout layout = LayoutOf(spec_, tensor);
    const auto tokens = TokensOf(ShardsOf(plan_, layout)[rank]);
    const int64_t rows = static_cast<int64_t>(tokens.size());
    PoisonedBuffer& buffer = buffers_[rank][id];
    const int64_t bytes = layout.outer * rows * layout.inner_bytes;
    // Only what travels may be larger, for another rank's block later on.
    const bool may_grow = to_buffer && (tensor == TensorId::kK || tensor == TensorId::kV ||
                                        tensor == TensorId::kKvSegmentIds);
    if (may_grow ? buffer.bytes() < bytes : buffer.bytes() != bytes) {
      return Broken(rank, 0,
                    absl::StrCat(schedule_.programs[rank].buffers[id].name, " has ", buffer.bytes(),
                                 " bytes, its shard ", bytes));
    }
    for (int64_t outer = 0; outer < layout.outer; ++outer) {
      for (int64_t row = 0; row < rows; ++row) {
        uint8_t* local = buffer.data() + (outer * rows + row) * layout.inner_bytes;
        uint8_t* global = whole + (outer * layout.rows + tokens[row]) * layout.inner_bytes;
        std::memcpy(to_buffer ? local : global, to_buffer ? global : local, layout.inner_bytes);
      }
    }
    return absl::OkStatus();
  }

  absl::StatusOr<TensorMap> Collect(size_t steps) {
    TensorMap outputs;
    for (int rank = 0; rank < plan_.world_size; ++rank) {
      const Program& program = schedule_.programs[rank];
      for (size_t id = 0; id < program.buffers.size(); ++id) {
        if (!buffers_[rank][id].guards_intact()) {
          return Broken(rank, steps, absl::StrCat("wrote outside ", program.buffers[id].name));
        }
        if (!program.buffers[id].output.has_value()) continue;
        const TensorId tensor = *program.buffers[id].output;
        std::vector<uint8_t>& whole = outputs[tensor];
        whole.resize(LayoutOf(spec_, tensor).bytes(), PoisonedBuffer::kPoison);
        absl::Status status = CopyShard(rank, id, tensor, whole.data(), /*to_buffer=*/false);
        if (!status.ok()) return status;
      }
    }
    return outputs;
  }

  // --- Transfers --------------------------------------------------------------

  absl::Status Exchange(size_t step) {
    // What is under way from one rank to another, in order.
    std::map<std::pair<int, int>, std::deque<std::vector<uint8_t>>> wire;
    for (const bool sending : {true, false}) {
      for (int rank = 0; rank < plan_.world_size; ++rank) {
        const Program& program = schedule_.programs[rank];
        if (step >= program.steps.size()) continue;
        for (const Transfer& transfer : program.steps[step].transfers) {
          if ((transfer.kind == Transfer::Kind::kSend) != sending) continue;
          if (transfer.peer < 0 || transfer.peer >= plan_.world_size || transfer.peer == rank) {
            return Broken(rank, step, absl::StrCat("no such peer: ", transfer.peer));
          }
          absl::StatusOr<uint8_t*> data = Address(rank, step, transfer.range);
          if (!data.ok()) return data.status();
          if (sending) {
            wire[{rank, transfer.peer}].emplace_back(*data, *data + transfer.range.bytes);
            continue;
          }
          auto& messages = wire[{transfer.peer, rank}];
          if (messages.empty()) {
            return Broken(rank, step, absl::StrCat("nothing to receive from ", transfer.peer));
          }
          if (static_cast<int64_t>(messages.front().size()) != transfer.range.bytes) {
            return Broken(rank, step,
                          absl::StrCat("receives ", transfer.range.bytes, " bytes from ",
                                       transfer.peer, ", which sends ", messages.front().size()));
          }
          std::copy(messages.front().begin(), messages.front().end(), *data);
          messages.pop_front();
        }
      }
    }
    for (const auto& [pair, messages] : wire) {
      if (!messages.empty()) {
        return Broken(pair.first, step, absl::StrCat("nobody receives at ", pair.second));
      }
    }
    return absl::OkStatus();
  }

  // --- Compute ----------------------------------------------------------------

  absl::StatusOr<uint8_t*> Address(int rank, size_t step, const ByteRange& range) {
    std::vector<PoisonedBuffer>& buffers = buffers_[rank];
    if (range.buffer < 0 || range.buffer >= static_cast<int>(buffers.size()) || range.offset < 0 ||
        range.bytes < 0 || range.offset + range.bytes > buffers[range.buffer].bytes()) {
      return Broken(rank, step,
                    absl::StrCat("range ", range.offset, " + ", range.bytes,
                                 " is not inside buffer ", range.buffer));
    }
    return buffers[range.buffer].data() + range.offset;
  }

  std::vector<Piece> Pieces(const Shard& shard, const std::vector<int64_t>& cu_seqlens,
                            int64_t begin, int64_t end) {
    if (cut_ == Cut::kPieces) return SlicePieces(CutIntoPieces(shard, cu_seqlens), begin, end);
    const std::vector<int64_t> tokens = TokensOf(shard);
    return RowPieces({tokens.begin() + begin, tokens.begin() + end}, cu_seqlens);
  }

  absl::Status Compute(int rank, size_t step) {
    const Program& program = schedule_.programs[rank];
    if (step >= program.steps.size()) return absl::OkStatus();
    for (const ComputeCall& call : program.steps[step].calls) {
      absl::StatusOr<KernelCall> bound = Bind(rank, step, call);
      if (!bound.ok()) return bound.status();
      if (absl::Status status = kernels_(*bound); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::StatusOr<KernelCall> Bind(int rank, size_t step, const ComputeCall& call) {
    Operands operands(this, rank, step, call);
    KernelCall bound = operands.Bind();
    if (!operands.error.ok()) return operands.error;
    return bound;
  }

  // The second binding of every op, on purpose: from the words of program.h, apart from
  // worker/executor/bind_call. Each operand must have exactly the bytes of its shape.
  struct Operands {
    Operands(Interpreter* interpreter, int rank, size_t step, const ComputeCall& call)
        : interpreter(*interpreter),
          rank(rank),
          step(step),
          call(call),
          part(call.part == ComputeCall::kWhole ? nullptr : &interpreter->parts_.at(call.part)),
          spec(part == nullptr ? interpreter->spec_ : part->spec),
          whole_problem(part == nullptr ? interpreter->problem_ : part->problem) {
      const AttentionShape& shape = spec.shape;
      kv_heads = call.heads.of == 0 ? shape.num_kv_heads : call.heads.count;
      heads = shape.num_heads / shape.num_kv_heads * kv_heads;
      statistics = shape.batch * heads * call.q.rows();
      q_elements = statistics * shape.head_dim;
      out_elements = statistics * shape.head_dim_v;
    }

    uint8_t* Range(const ByteRange& range) {
      absl::StatusOr<uint8_t*> data = interpreter.Address(rank, step, range);
      if (!data.ok()) error.Update(data.status());
      return data.ok() ? *data : nullptr;
    }
    uint8_t* Exactly(const ByteRange& range, int64_t bytes) {
      if (range.bytes != bytes) {
        Fail(absl::StrCat("an operand of ", range.bytes, " bytes instead of ", bytes));
      }
      return Range(range);
    }
    uint8_t* Elements(const ByteRange& range, int64_t count) {
      return Exactly(range, count * ElementBytes(spec.dtype));
    }
    uint8_t* Results(const ByteRange& range, int64_t count) {
      return Exactly(range, count * ElementBytes(spec.result_dtype()));
    }
    float* Floats(const ByteRange& range, int64_t count) {
      return reinterpret_cast<float*>(Exactly(range, count * 4));
    }
    void Fail(const std::string& reason) { error.Update(Broken(rank, step, reason)); }

    // Of the call's heads: the whole one's numbers of just these.
    const AttentionProblem* Problem() {
      if (call.heads.of == 0) return &whole_problem;
      const AttentionShape& shape = spec.shape;
      AttentionProblem& problem = interpreter.some_heads_.emplace_back(whole_problem);
      if (call.heads.of != shape.num_kv_heads || call.heads.begin < 0 || kv_heads < 1 ||
          call.heads.begin + kv_heads > shape.num_kv_heads) {
        Fail("heads that the problem does not have");
        return &problem;
      }
      const int64_t first = call.heads.begin * (shape.num_heads / shape.num_kv_heads);
      problem.num_heads = heads;
      problem.num_kv_heads = kv_heads;
      problem.terms.dropout.first_head += static_cast<uint32_t>(first);
      const std::vector<float> slopes = std::move(problem.terms.alibi_slopes);
      problem.terms.alibi_slopes.clear();
      for (size_t i = 0; i < slopes.size(); ++i) {
        const int64_t head = static_cast<int64_t>(i) % shape.num_heads;
        if (head >= first && head < first + heads) {
          problem.terms.alibi_slopes.push_back(slopes[i]);
        }
      }
      return &problem;
    }

    std::vector<Piece> QPieces() {
      if (part != nullptr) {
        return SlicePieces(part->q[call.q.source_rank].pieces, call.q.row_begin, call.q.row_end);
      }
      return interpreter.Pieces(interpreter.plan_.q[call.q.source_rank], spec.shape.cu_seqlens_q,
                                call.q.row_begin, call.q.row_end);
    }

    std::vector<KvBlock> Blocks(bool backward, bool with_values = true) {
      const AttentionShape& shape = spec.shape;
      std::vector<KvBlock> blocks;
      for (const KvOperand& operand : call.kv) {
        const int64_t vectors = shape.batch * operand.rows() * kv_heads;
        KvBlock block;
        block.rows = operand.rows();
        block.pieces =
            part != nullptr
                ? SlicePieces(part->kv[operand.source_rank].pieces, operand.row_begin,
                              operand.row_end)
                : interpreter.Pieces(interpreter.plan_.kv[operand.source_rank], shape.cu_seqlens_k,
                                     operand.row_begin, operand.row_end);
        block.k = Elements(operand.k, vectors * shape.head_dim);
        if (with_values) block.v = Elements(operand.v, vectors * shape.head_dim_v);
        if (spec.options.segment_ids) {
          block.segment_ids = reinterpret_cast<const int32_t*>(
              Exactly(operand.segment_ids, shape.batch * operand.rows() * 4));
        }
        if (backward) {
          block.dk = Floats(operand.dk, vectors * shape.head_dim);
          block.dv = Floats(operand.dv, vectors * shape.head_dim_v);
        }
        blocks.push_back(std::move(block));
      }
      return blocks;
    }

    // A shard's rows of a bias or a mask: planes, rows, bytes of a row.
    int64_t PlaneBytes(bool per_batch, bool per_head, int64_t row_bytes) {
      const AttentionShape& shape = spec.shape;
      return (per_batch ? shape.batch : 1) * (per_head ? heads : 1) * call.q.rows() * row_bytes;
    }
    int64_t BiasBytes() {
      const BiasForm& bias = *spec.options.bias;
      const int64_t element = bias.float32 ? 4 : ElementBytes(spec.dtype);
      return PlaneBytes(bias.per_batch, bias.per_head, whole_problem.terms.columns * element);
    }

    TermOperands Terms() {
      const AttentionOptions& options = spec.options;
      const int64_t columns = whole_problem.terms.columns;
      TermOperands terms;
      if (options.bias) terms.bias = Exactly(call.q.Option(TensorId::kBias), BiasBytes());
      if (options.mask) {
        const MaskForm& mask = *options.mask;
        terms.mask = Exactly(
            call.q.Option(TensorId::kMask),
            PlaneBytes(mask.per_batch, mask.per_head, mask.bits ? (columns + 7) / 8 : columns));
      }
      if (options.segment_ids) {
        terms.q_segment_ids = reinterpret_cast<const int32_t*>(
            Exactly(call.q.Option(TensorId::kQSegmentIds), spec.shape.batch * call.q.rows() * 4));
      }
      return terms;
    }

    KernelCall BiasGradient() {
      BiasGradientCall bias;
      bias.problem = Problem();
      bias.q_rows = call.q.rows();
      bias.q_pieces = QPieces();
      bias.q = Elements(call.q.q, q_elements);
      bias.dout = Elements(call.q.dout, out_elements);
      bias.lse = Floats(call.q.lse, statistics);
      bias.delta = Floats(call.q.delta, statistics);
      bias.blocks = Blocks(false);
      bias.terms = Terms();
      bias.dbias = Exactly(call.target, BiasBytes());
      return bias;
    }

    KernelCall Forward() {
      ForwardCall forward;
      forward.problem = Problem();
      forward.q_rows = call.q.rows();
      forward.q_pieces = QPieces();
      forward.q = Elements(call.q.q, q_elements);
      forward.blocks = Blocks(false);
      forward.terms = Terms();
      forward.initial = call.initial;
      forward.final = call.final;
      if (!(call.initial && call.final)) forward.out_acc = Floats(call.q.out_acc, out_elements);
      forward.lse = Floats(call.q.lse, statistics);
      if (call.final) forward.out = Results(call.q.out, out_elements);
      if (call.final && spec.options.sinks) forward.sinks = Sinks();
      return forward;
    }

    KernelCall Delta() {
      DeltaCall delta;
      delta.problem = &whole_problem;
      delta.q_rows = call.q.rows();
      delta.out = Results(call.q.out, out_elements);
      delta.dout = Elements(call.q.dout, out_elements);
      delta.delta = Floats(call.q.delta, statistics);
      if (spec.has_dlse) {
        delta.dlse = Floats(call.q.Option(TensorId::kDlse), statistics);
        delta.lse = Floats(call.q.lse, statistics);
      }
      return delta;
    }

    const float* Sinks() { return Floats(call.q.Option(TensorId::kSinks), heads); }

    KernelCall SinkGradient() {
      SinkGradientCall sinks;
      sinks.problem = &whole_problem;
      sinks.q_rows = call.q.rows();
      sinks.sinks = Sinks();
      sinks.lse = Floats(call.q.lse, statistics);
      sinks.delta = Floats(call.q.delta, statistics);
      sinks.dsinks = Floats(call.target, spec.shape.num_heads);
      return sinks;
    }

    KernelCall Backward() {
      BackwardCall backward;
      backward.problem = Problem();
      backward.q_rows = call.q.rows();
      backward.q_pieces = QPieces();
      backward.q = Elements(call.q.q, q_elements);
      backward.dout = Elements(call.q.dout, out_elements);
      backward.lse = Floats(call.q.lse, statistics);
      backward.delta = Floats(call.q.delta, statistics);
      backward.dq_acc = Floats(call.q.dq_acc, q_elements);
      backward.blocks = Blocks(true);
      backward.terms = Terms();
      return backward;
    }

    KernelCall Merge() {
      MergeCall merge;
      merge.problem = &whole_problem;
      merge.q_rows = call.q.rows();
      if (call.parts.empty()) Fail("a merge of nothing");
      for (const PartialOperand& part : call.parts) {
        merge.parts.push_back({Floats(part.out, out_elements), Floats(part.lse, statistics)});
      }
      merge.final = call.final;
      merge.lse = Floats(call.q.lse, statistics);
      if (!call.final) merge.out_acc = Floats(call.q.out_acc, out_elements);
      if (call.final) merge.out = Results(call.q.out, out_elements);
      if (call.final && spec.options.sinks) merge.sinks = Sinks();
      return merge;
    }

    KernelCall Copy() {
      const CopyForm& form = call.copy;
      const auto check = [&](const ByteRange& range, int64_t pitch) {
        if (form.runs < 1 || form.run_bytes < 1 || pitch < form.run_bytes ||
            range.bytes != (form.runs - 1) * pitch + form.run_bytes) {
          Fail("a copy whose runs are not its bytes");
        }
        return Range(range);
      };
      return CopyCall{check(call.target, form.target_pitch),
                      check(call.source, form.source_pitch),
                      form.runs,
                      form.run_bytes,
                      form.source_pitch,
                      form.target_pitch};
    }

    // Rows and heads of a part, by the definition's lists of them.
    struct PartLists {
      int64_t rows;
      const std::vector<RowRun>& row_runs;
      const std::vector<int32_t>& head_of;
    };
    PartLists ListsOf(const ReferencePart& of) {
      const PartForm& form = call.form;
      const std::vector<int64_t>& rows = (form.of_keys ? of.kv : of.q)[rank].rows;
      std::vector<RowRun>& runs = interpreter.runs_.emplace_back();
      for (size_t i = 0; i < rows.size(); ++i) {
        runs.push_back({rows[i], 1, 1, static_cast<int64_t>(i)});
      }
      const auto& heads = form.heads_of == PartForm::Heads::kKeyValue ? of.kv_heads
                          : form.heads_of == PartForm::Heads::kQuery  ? of.q_heads
                                                                      : interpreter.only_head_;
      std::vector<int32_t>& head_of =
          interpreter.heads_of_.emplace_back(heads.begin(), heads.end());
      return {static_cast<int64_t>(rows.size()), runs, head_of};
    }

    int64_t RowsOfWhole() const {
      return RowsIn((call.form.of_keys ? interpreter.plan_.kv : interpreter.plan_.q)[rank]);
    }
    int64_t HeadsOfWhole() const {
      const AttentionShape& shape = interpreter.spec_.shape;
      return call.form.heads_of == PartForm::Heads::kKeyValue ? shape.num_kv_heads
             : call.form.heads_of == PartForm::Heads::kQuery  ? shape.num_heads
                                                              : 1;
    }

    KernelCall Gather() {
      GatherCall made;
      if (part == nullptr) {
        Fail("a copy of no part");
        return made;
      }
      const PartLists lists = ListsOf(*part);
      made.heads_first = call.form.heads_first;
      made.outer = call.form.outer;
      made.inner_bytes = call.form.inner_bytes;
      made.rows = RowsOfWhole();
      made.part_rows = lists.rows;
      made.heads = HeadsOfWhole();
      made.part_heads = static_cast<int64_t>(lists.head_of.size());
      made.row_runs = lists.row_runs;
      made.head_of = lists.head_of;
      made.whole = Exactly(call.source, made.outer * made.rows * made.heads * made.inner_bytes);
      made.part =
          Exactly(call.target, made.outer * made.part_rows * made.part_heads * made.inner_bytes);
      return made;
    }

    KernelCall Scatter(bool merges) {
      ScatterCall made;
      if (part == nullptr || call.part + call.parts.size() > interpreter.parts_.size()) {
        Fail("results of no part");
        return made;
      }
      const PartForm& form = call.form;
      const AttentionSpec& whole = interpreter.spec_;
      made.merges = merges;
      made.heads_first = form.heads_first;
      made.initial = call.initial;
      made.final = call.final;
      made.dtype = whole.result_dtype();
      made.outer = form.outer;
      made.rows = RowsOfWhole();
      made.heads = HeadsOfWhole();
      made.width = form.inner_bytes / 4;
      for (size_t i = 0; i < call.parts.size(); ++i) {
        const PartLists lists = ListsOf(interpreter.parts_[call.part + i]);
        const int64_t vectors =
            made.outer * lists.rows * static_cast<int64_t>(lists.head_of.size());
        ScatterPart& scattered = made.parts.emplace_back();
        scattered.rows = lists.rows;
        scattered.row_runs = lists.row_runs;
        scattered.head_of = lists.head_of;
        scattered.values = Floats(call.parts[i].out, vectors * made.width);
        if (merges) scattered.lse = Floats(call.parts[i].lse, vectors);
      }
      const int64_t vectors = made.outer * made.rows * made.heads;
      const int64_t result_bytes = vectors * made.width * ElementBytes(made.dtype);
      if (!merges) {
        if (!call.initial) made.values = Floats(call.source, vectors * made.width);
        if (call.final) {
          made.result = Exactly(call.target, result_bytes);
        } else {
          made.values = Floats(call.target, vectors * made.width);
        }
        return made;
      }
      if (made.width != whole.shape.head_dim_v) Fail("a merge of other rows than out's");
      made.lse = Floats(call.q.lse, vectors);
      if (!(call.initial && call.final)) {
        made.values = Floats(call.q.out_acc, vectors * made.width);
      }
      if (call.final) made.result = Exactly(call.q.out, result_bytes);
      if (call.final && whole.options.sinks) {
        made.sinks = Floats(call.q.Option(TensorId::kSinks), whole.shape.num_heads);
      }
      return made;
    }

    KernelCall Probabilities() {
      ProbabilitiesCall made;
      made.problem = &whole_problem;
      made.q_rows = call.q.rows();
      made.q_pieces = QPieces();
      made.q = Elements(call.q.q, q_elements);
      made.blocks = Blocks(false, /*with_values=*/false);
      made.terms = Terms();
      made.initial = call.initial;
      made.final = call.final;
      const AttentionShape& shape = spec.shape;
      // By the definition: whose row each query is.
      const std::vector<int64_t> tokens = TokensOf(interpreter.plan_.q[rank]);
      for (const ProbabilityRow& row : spec.probability_rows) {
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
      made.target = Floats(call.target, rows * shape.num_heads * made.columns);
      if (call.final) made.lse = Floats(call.q.lse, statistics);
      return made;
    }

    KernelCall Bind() {
      const int64_t floats = call.source.bytes / 4;
      switch (call.op) {
        case ComputeCall::Op::kForward:
          return Forward();
        case ComputeCall::Op::kDelta:
          return Delta();
        case ComputeCall::Op::kSinkGradient:
          return SinkGradient();
        case ComputeCall::Op::kBiasGradient:
          return BiasGradient();
        case ComputeCall::Op::kProbabilities:
          return Probabilities();
        case ComputeCall::Op::kBackward:
          return Backward();
        case ComputeCall::Op::kZero:
          return ZeroCall{Range(call.target), call.target.bytes};
        case ComputeCall::Op::kAdd:
          return AddCall{Floats(call.target, floats), Floats(call.source, floats), floats};
        case ComputeCall::Op::kConvert:
          return ConvertCall{spec.dtype, Elements(call.target, floats), Floats(call.source, floats),
                             floats};
        case ComputeCall::Op::kMerge:
          return Merge();
        case ComputeCall::Op::kCopy:
          return Copy();
        case ComputeCall::Op::kGather:
          return Gather();
        case ComputeCall::Op::kScatterAdd:
          return Scatter(/*merges=*/false);
        case ComputeCall::Op::kScatterMerge:
          return Scatter(/*merges=*/true);
      }
      Fail("an unknown op");
      return ZeroCall{};
    }

    Interpreter& interpreter;
    const int rank;
    const size_t step;
    const ComputeCall& call;
    const ReferencePart* const part;  // null: of the whole problem
    const AttentionSpec& spec;        // of the call
    const AttentionProblem& whole_problem;
    int64_t kv_heads;  // of the call
    int64_t heads;
    int64_t statistics;  // elements of lse and delta
    int64_t q_elements;
    int64_t out_elements;
    absl::Status error;
  };

  const AttentionSpec& spec_;
  const ShardPlan& plan_;
  const Schedule& schedule_;
  const Kernels& kernels_;
  const Cut cut_;
  AttentionProblem problem_;
  std::vector<ReferencePart> parts_;
  std::deque<AttentionProblem> some_heads_;  // of calls that have not all
  // What calls of parts refer to.
  const std::vector<int64_t> only_head_ = {0};
  std::deque<std::vector<RowRun>> runs_;
  std::deque<std::vector<int32_t>> heads_of_;
  std::vector<std::vector<PoisonedBuffer>> buffers_;  // [rank][buffer]
};

}  // namespace

absl::StatusOr<TensorMap> Interpret(const AttentionSpec& spec, const ShardPlan& plan,
                                    const Schedule& schedule, const TensorMap& inputs,
                                    const Kernels& kernels, Cut cut) {
  return Interpreter(spec, plan, schedule, kernels, cut).Run(inputs);
}

}  // namespace ringattn::tests
