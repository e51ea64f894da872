#include "worker/kernels/cpu/probabilities.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>

#include "worker/kernels/cpu/score_pass.h"
#include "worker/kernels/cpu/simd/elementwise.h"
#include "worker/kernels/cpu/simd/tile_ops.h"

namespace ringattn::worker::cpu {
namespace {

constexpr float kUnseen = -std::numeric_limits<float>::infinity();
// How far from a wide lse rounding may take a row's scores.
constexpr double kMostRounding = 1.0 / 1024;
// Between two looks at the stop word.
constexpr int64_t kKeysPerLook = 1024;

// Weights are those before dropout.
AttentionProblem WithoutDropout(AttentionProblem problem) {
  problem.terms.dropout = {};
  return problem;
}

class ChosenRows {
 public:
  ChosenRows(const ProbabilitiesCall& call, const Progress& progress)
      : call_(call),
        problem_(WithoutDropout(*call.problem)),
        pass_(problem_, call.q_rows, call.terms),
        progress_(progress) {
    assert(!problem_.terms.by_keys);
  }

  void Run(int64_t index, int64_t head) const {
    const ChosenRow& chosen = call_.rows[index];
    float* const row = call_.target + (index * problem_.num_heads + head) * call_.columns;
    if (call_.initial) std::fill_n(row, call_.columns, kUnseen);
    if (const Piece* q = PieceOf(chosen.row)) {
      for (const KvBlock& block : call_.blocks) Score(chosen, head, *q, block, row);
    }
    if (!call_.final) return;
    Weigh(call_.lse[(chosen.batch * problem_.num_heads + head) * call_.q_rows + chosen.row], row);
  }

 private:
  // The row's scores become weights.
  void Weigh(float lse, float* row) const {
    const double divisor = DivisorOf(lse, row);
    for (int64_t j = 0; j < call_.columns; ++j) {
      const bool seen = row[j] != kUnseen && lse != kUnseen;
      const double log = row[j] - divisor;
      row[j] = seen ? static_cast<float>(std::exp(log > 0 ? 0.0 : log)) : 0.0f;  // NaN stays NaN
    }
  }

  // The logarithm of what the weights are divided by. Large scores are rounded to steps of more
  // than 1, and here by another order of additions than in the forward that made the lse: then it
  // is the row's own, unless a sink is far above it.
  double DivisorOf(float lse, const float* row) const {
    if (!IsWide(lse)) return lse;
    const double max = *std::max_element(row, row + call_.columns);
    double sum = 0;
    for (int64_t j = 0; j < call_.columns; ++j) sum += std::exp(row[j] - max);
    const double own = max + std::log(sum);
    return std::abs(lse - own) <= std::abs(lse) * kMostRounding ? own : lse;
  }

  // Null for a row of no document.
  const Piece* PieceOf(int64_t local_row) const {
    for (const Piece& piece : call_.q_pieces) {
      if (piece.local_begin <= local_row && local_row < piece.local_begin + piece.length) {
        return &piece;
      }
    }
    return nullptr;
  }

  void Score(const ChosenRow& chosen, int64_t head, const Piece& q, const KvBlock& block,
             float* row) const {
    const int64_t dim = problem_.head_dim;
    const int64_t bytes = dim * ElementBytes(problem_.dtype);
    const int64_t kv_head = head / (problem_.num_heads / problem_.num_kv_heads);
    const int64_t q_row = chosen.row - q.local_begin;
    const void* query =
        static_cast<const char*>(call_.q) +
        ((chosen.batch * call_.q_rows + chosen.row) * problem_.num_heads + head) * bytes;
    const TermRow term_row{chosen.batch, head, chosen.row, q.document, q.PositionOf(q_row)};
    for (const Piece& keys : block.pieces) {
      const RowRange seen = KeysOfRow(q, q_row, keys, problem_.bands[q.document]);
      for (int64_t r = seen.begin; r < seen.end; ++r) {
        if (r % kKeysPerLook == 0) {
          if (progress_.stopped()) return;
          progress_.CountTile(0);
        }
        const int64_t local = chosen.batch * block.rows + keys.local_begin + r;
        const void* key =
            static_cast<const char*>(block.k) + (local * problem_.num_kv_heads + kv_head) * bytes;
        const int64_t position = keys.PositionOf(r);
        PairTerm term;
        if (pass_.any()) {
          TermKeys term_key;
          term_key.count = 1;
          term_key.first_position = term_key.first_plane_column = position;
          if (block.segment_ids != nullptr) term_key.segment_ids = block.segment_ids + local;
          term = pass_.TermOf(term_row, term_key);
        }
        if (!term.visible) continue;
        double slope;
        row[position] = static_cast<float>(pass_.ScoreOf(term, Product(query, key), &slope));
      }
    }
  }

  // Finite if the row and the key are: products of bf16 or fp32 need not fit fp32.
  double Product(const void* query, const void* key) const {
    const float product = Dot(problem_.dtype, query, key, problem_.head_dim);
    if (std::isfinite(product)) return product;
    float a[kMaxHeadDim], b[kMaxHeadDim];
    ConvertToFloat(problem_.dtype, query, a, problem_.head_dim);
    ConvertToFloat(problem_.dtype, key, b, problem_.head_dim);
    double sum = 0;
    for (int64_t d = 0; d < problem_.head_dim; ++d) sum += double{a[d]} * b[d];
    return std::isfinite(sum) ? sum : product;
  }

  const ProbabilitiesCall& call_;
  const AttentionProblem problem_;
  const ScorePass pass_;
  const Progress& progress_;
};

}  // namespace

absl::Status Probabilities(const ProbabilitiesCall& call, Workspace& workspace,
                           const Progress& progress) {
  const int64_t heads = call.problem->num_heads;
  const ChosenRows rows(call, progress);
  workspace.pool.ParallelFor(static_cast<int64_t>(call.rows.size()) * heads,
                             [&](int, int64_t task) {
                               if (progress.stopped()) return;
                               rows.Run(task / heads, task % heads);
                               progress.CountTile(0);
                             });
  return progress.stopped() ? absl::CancelledError("kernel stopped") : absl::OkStatus();
}

}  // namespace ringattn::worker::cpu
