#include "tests/sweep/naive_kernels.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "common/oracle/numeric.h"

namespace ringattn::tests {
namespace {

using oracle::Load;
using oracle::Store;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Where a row is: its document and position there.
struct Place {
  int64_t document = -1;
  int64_t position = 0;
};

std::vector<Place> PlacesOf(const std::vector<Piece>& pieces, int64_t rows) {
  std::vector<Place> places(rows);
  for (const Piece& piece : pieces) {
    for (int64_t r = 0; r < piece.length; ++r) {
      places[piece.local_begin + r] = {piece.document, piece.position + piece.stride * r};
    }
  }
  return places;
}

bool Sees(const AttentionProblem& problem, const Place& q, const Place& k) {
  if (q.document < 0 || q.document != k.document) return false;
  const Band& band = problem.bands[q.document];
  const int64_t difference = k.position - q.position;
  return band.lower <= difference && difference <= band.upper;
}

// Element offset of a row's head in [batch, rows, heads, dim].
int64_t RowOffset(int64_t b, int64_t rows, int64_t row, int64_t heads, int64_t head, int64_t dim) {
  return ((b * rows + row) * heads + head) * dim;
}

double Dot(DType dtype, const void* x, int64_t x_offset, const void* y, int64_t y_offset,
           int64_t dim) {
  double sum = 0.0;
  for (int64_t d = 0; d < dim; ++d) {
    sum += Load(dtype, x, x_offset + d) * Load(dtype, y, y_offset + d);
  }
  return sum;
}

struct Score {
  double value;
  double slope;  // derivative through the softcap
};

Score Cap(const AttentionProblem& problem, double dot) {
  const double score = problem.softmax_scale * dot;
  if (problem.softcap == 0.0f) return {score, 1.0};
  const double t = std::tanh(score / problem.softcap);
  return {problem.softcap * t, 1.0 - t * t};
}

struct SeenKey {
  const KvBlock* block;
  int64_t row;
  Score score;
};

// The keys of all blocks that query row `i` sees.
std::vector<SeenKey> KeysSeen(const AttentionProblem& p, const std::vector<KvBlock>& blocks,
                              const Place& place, const void* q, int64_t q_offset, int64_t b,
                              int64_t kv_head) {
  std::vector<SeenKey> seen;
  for (const KvBlock& block : blocks) {
    const std::vector<Place> places = PlacesOf(block.pieces, block.rows);
    for (int64_t j = 0; j < block.rows; ++j) {
      if (!Sees(p, place, places[j])) continue;
      const int64_t k_offset = RowOffset(b, block.rows, j, p.num_kv_heads, kv_head, p.head_dim);
      seen.push_back({&block, j, Cap(p, Dot(p.dtype, q, q_offset, block.k, k_offset, p.head_dim))});
    }
  }
  return seen;
}

void ForwardRow(const ForwardCall& call, const Place& place, int64_t b, int64_t i, int64_t h) {
  const AttentionProblem& p = *call.problem;
  const int64_t kv_head = h / (p.num_heads / p.num_kv_heads);
  const int64_t q_offset = RowOffset(b, call.q_rows, i, p.num_heads, h, p.head_dim);
  const int64_t out_offset = RowOffset(b, call.q_rows, i, p.num_heads, h, p.head_dim_v);
  float& lse = call.lse[(b * p.num_heads + h) * call.q_rows + i];

  // The previous partial is one more "key" with score lse and value out.
  double max = call.initial ? -kInfinity : lse;
  const std::vector<SeenKey> seen = KeysSeen(p, call.blocks, place, call.q, q_offset, b, kv_head);
  for (const SeenKey& key : seen) max = std::max(max, key.score.value);
  double sum = 0.0;
  std::vector<double> out(p.head_dim_v, 0.0);
  if (!call.initial) {
    const double weight = max == -kInfinity ? 0.0 : std::exp(lse - max);
    sum += weight;
    for (int64_t d = 0; d < p.head_dim_v; ++d) out[d] = weight * call.out_acc[out_offset + d];
  }
  for (const SeenKey& key : seen) {
    const double weight = std::exp(key.score.value - max);
    const int64_t v_offset =
        RowOffset(b, key.block->rows, key.row, p.num_kv_heads, kv_head, p.head_dim_v);
    sum += weight;
    for (int64_t d = 0; d < p.head_dim_v; ++d) {
      out[d] += weight * Load(p.dtype, key.block->v, v_offset + d);
    }
  }
  for (double& value : out) value = sum == 0.0 ? 0.0 : value / sum;
  lse = sum == 0.0 ? -kInfinity : static_cast<float>(max + std::log(sum));
  for (int64_t d = 0; d < p.head_dim_v; ++d) {
    if (call.final) {
      Store(p.dtype, call.out, out_offset + d, out[d]);
    } else {
      call.out_acc[out_offset + d] = static_cast<float>(out[d]);
    }
  }
}

void BackwardRow(const BackwardCall& call, const Place& place, int64_t b, int64_t i, int64_t h) {
  const AttentionProblem& p = *call.problem;
  const int64_t kv_head = h / (p.num_heads / p.num_kv_heads);
  const int64_t q_offset = RowOffset(b, call.q_rows, i, p.num_heads, h, p.head_dim);
  const int64_t dout_offset = RowOffset(b, call.q_rows, i, p.num_heads, h, p.head_dim_v);
  const int64_t statistic = (b * p.num_heads + h) * call.q_rows + i;
  const double lse = call.lse[statistic];
  if (lse == -kInfinity) return;
  for (const SeenKey& key : KeysSeen(p, call.blocks, place, call.q, q_offset, b, kv_head)) {
    const int64_t k_offset =
        RowOffset(b, key.block->rows, key.row, p.num_kv_heads, kv_head, p.head_dim);
    const int64_t v_offset =
        RowOffset(b, key.block->rows, key.row, p.num_kv_heads, kv_head, p.head_dim_v);
    const double probability = std::exp(key.score.value - lse);
    const double dp = Dot(p.dtype, call.dout, dout_offset, key.block->v, v_offset, p.head_dim_v);
    const double ds =
        p.softmax_scale * probability * (dp - call.delta[statistic]) * key.score.slope;
    for (int64_t d = 0; d < p.head_dim_v; ++d) {
      key.block->dv[v_offset + d] +=
          static_cast<float>(probability * Load(p.dtype, call.dout, dout_offset + d));
    }
    for (int64_t d = 0; d < p.head_dim; ++d) {
      call.dq_acc[q_offset + d] +=
          static_cast<float>(ds * Load(p.dtype, key.block->k, k_offset + d));
      key.block->dk[k_offset + d] += static_cast<float>(ds * Load(p.dtype, call.q, q_offset + d));
    }
  }
}

template <typename Call, typename RowFunction>
void ForEachRow(const Call& call, RowFunction row) {
  for (int64_t b = 0; b < call.problem->batch; ++b) {
    for (int64_t h = 0; h < call.problem->num_heads; ++h) {
      for (int64_t i = 0; i < call.q_rows; ++i) row(b, i, h);
    }
  }
}

struct Runner {
  void operator()(const ForwardCall& call) const {
    const std::vector<Place> places = PlacesOf(call.q_pieces, call.q_rows);
    ForEachRow(call,
               [&](int64_t b, int64_t i, int64_t h) { ForwardRow(call, places[i], b, i, h); });
  }
  void operator()(const BackwardCall& call) const {
    const std::vector<Place> places = PlacesOf(call.q_pieces, call.q_rows);
    ForEachRow(call,
               [&](int64_t b, int64_t i, int64_t h) { BackwardRow(call, places[i], b, i, h); });
  }
  void operator()(const DeltaCall& call) const {
    const AttentionProblem& p = *call.problem;
    ForEachRow(call, [&](int64_t b, int64_t i, int64_t h) {
      const int64_t offset = RowOffset(b, call.q_rows, i, p.num_heads, h, p.head_dim_v);
      call.delta[(b * p.num_heads + h) * call.q_rows + i] =
          static_cast<float>(Dot(p.dtype, call.dout, offset, call.out, offset, p.head_dim_v));
    });
  }
  void operator()(const ZeroCall& call) const {
    if (call.bytes > 0) std::memset(call.target, 0, call.bytes);
  }
  void operator()(const AddCall& call) const {
    for (int64_t i = 0; i < call.count; ++i) call.target[i] += call.source[i];
  }
  void operator()(const ConvertCall& call) const {
    for (int64_t i = 0; i < call.count; ++i) Store(call.dtype, call.target, i, call.source[i]);
  }
};

}  // namespace

void RunNaively(const KernelCall& call) { std::visit(Runner(), call); }

}  // namespace ringattn::tests
