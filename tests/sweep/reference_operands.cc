#include "tests/sweep/reference_operands.h"

#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace ringattn::tests {

using namespace ringattn::worker;  // what is under test

namespace {

// Cut by keys, the pairs' planes have a row for each query and a column for each of the rank's
// keys.
const AttentionProblem& ProblemOnRank(const AttentionProblem& problem, const AttentionSpec& spec,
                                      const ReferenceProblems& problems, int rank,
                                      CallStore& store) {
  if (!ShardsPairsByKeys(problems.plan())) return problem;
  AttentionProblem& own = store.some_heads.emplace_back(problem);
  own.terms.by_keys = true;
  own.terms.rows = spec.shape.seq_len_q;
  own.terms.columns = 0;
  for (const Span& span : problems.plan().kv[rank]) own.terms.columns += span.length;
  return own;
}

}  // namespace

Operands::Operands(const ReferenceProblems& problems, ReferenceMemory& memory, CallStore& store,
                   int rank, size_t step, const ComputeCall& call)
    : problems(problems),
      memory(memory),
      store(store),
      rank(rank),
      step(step),
      call(call),
      part(call.part == ComputeCall::kWhole ? nullptr : &problems.parts().at(call.part)),
      spec(part == nullptr ? problems.spec() : part->spec),
      whole_problem(ProblemOnRank(part == nullptr ? problems.problem() : part->problem, spec,
                                  problems, rank, store)) {
  const AttentionShape& shape = spec.shape;
  kv_heads = call.heads.of == 0 ? shape.num_kv_heads : call.heads.count;
  heads = shape.num_heads / shape.num_kv_heads * kv_heads;
  statistics = shape.batch * heads * call.q.rows();
  q_elements = statistics * shape.head_dim;
  out_elements = statistics * shape.head_dim_v;
}

uint8_t* Operands::Range(const ByteRange& range) {
  absl::StatusOr<uint8_t*> data = memory.Address(rank, step, range);
  if (!data.ok()) error.Update(data.status());
  return data.ok() ? *data : nullptr;
}

uint8_t* Operands::Exactly(const ByteRange& range, int64_t bytes) {
  if (range.bytes != bytes) {
    Fail(absl::StrCat("an operand of ", range.bytes, " bytes instead of ", bytes));
  }
  return Range(range);
}

uint8_t* Operands::Elements(const ByteRange& range, int64_t count) {
  return Exactly(range, count * ElementBytes(spec.dtype));
}

uint8_t* Operands::Results(const ByteRange& range, int64_t count) {
  return Exactly(range, count * ElementBytes(spec.result_dtype()));
}

float* Operands::Floats(const ByteRange& range, int64_t count) {
  return reinterpret_cast<float*>(Exactly(range, count * 4));
}

void Operands::Fail(const std::string& reason) { error.Update(Broken(rank, step, reason)); }

const AttentionProblem* Operands::Problem() {
  if (call.heads.of == 0) return &whole_problem;
  const AttentionShape& shape = spec.shape;
  AttentionProblem& problem = store.some_heads.emplace_back(whole_problem);
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

std::vector<Piece> Operands::QPieces() const {
  if (part != nullptr) {
    return SlicePieces(part->q[call.q.source_rank].pieces, call.q.row_begin, call.q.row_end);
  }
  return problems.Pieces(problems.plan().q[call.q.source_rank], spec.shape.cu_seqlens_q,
                         call.q.row_begin, call.q.row_end);
}

std::vector<KvBlock> Operands::Blocks(bool backward, bool with_values) {
  const AttentionShape& shape = spec.shape;
  std::vector<KvBlock> blocks;
  for (const KvOperand& operand : call.kv) {
    const int64_t vectors = shape.batch * operand.rows() * kv_heads;
    KvBlock block;
    block.rows = operand.rows();
    block.pieces =
        part != nullptr
            ? SlicePieces(part->kv[operand.source_rank].pieces, operand.row_begin, operand.row_end)
            : problems.Pieces(problems.plan().kv[operand.source_rank], shape.cu_seqlens_k,
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

int64_t Operands::PlaneBytes(bool per_batch, bool per_head, int64_t row_bytes) const {
  const AttentionShape& shape = spec.shape;
  const int64_t rows = ShardsPairsByKeys(problems.plan()) ? shape.seq_len_q : call.q.rows();
  return (per_batch ? shape.batch : 1) * (per_head ? heads : 1) * rows * row_bytes;
}

int64_t Operands::BiasBytes() const {
  const BiasForm& bias = *spec.options.bias;
  const int64_t element = bias.float32 ? 4 : ElementBytes(spec.dtype);
  return PlaneBytes(bias.per_batch, bias.per_head, whole_problem.terms.columns * element);
}

TermOperands Operands::Terms() {
  const AttentionOptions& options = spec.options;
  const int64_t columns = whole_problem.terms.columns;
  TermOperands terms;
  if (options.bias) terms.bias = Exactly(call.q.Option(TensorId::kBias), BiasBytes());
  if (options.mask) {
    const MaskForm& mask = *options.mask;
    terms.mask =
        Exactly(call.q.Option(TensorId::kMask),
                PlaneBytes(mask.per_batch, mask.per_head, mask.bits ? (columns + 7) / 8 : columns));
  }
  if (options.segment_ids) {
    terms.q_segment_ids = reinterpret_cast<const int32_t*>(
        Exactly(call.q.Option(TensorId::kQSegmentIds), spec.shape.batch * call.q.rows() * 4));
  }
  return terms;
}

const float* Operands::Sinks() { return Floats(call.q.Option(TensorId::kSinks), heads); }

}  // namespace ringattn::tests
