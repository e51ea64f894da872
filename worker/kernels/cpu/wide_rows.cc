#include "worker/kernels/cpu/wide_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "worker/kernels/cpu/simd/elementwise.h"
#include "worker/kernels/cpu/workspace/workspace.h"

namespace ringattn::worker::cpu {
namespace {

// Elements [0, dim) of one row of a [batch, rows, heads, dim] tensor.
void LoadRow(DType dtype, const void* tensor, int64_t row, int64_t dim, float* target) {
  const char* data = static_cast<const char*>(tensor) + row * dim * ElementBytes(dtype);
  ConvertToFloat(dtype, data, target, dim);
}

bool AllFinite(const float* values, int64_t count) {
  return std::all_of(values, values + count, [](float value) { return std::isfinite(value); });
}

}  // namespace

// The online softmax of one row.
struct WideRows::RowInDouble {
  double max = -std::numeric_limits<double>::infinity();
  double sum = 0;
  double out[kMaxHeadDim] = {};

  //   keep  dropout's factor of the weight, which the sum does not have
  void Add(double score, double keep, const float* v, int64_t dim) {
    if (score > max) {
      const double correction = std::exp(max - score);
      sum *= correction;
      for (int64_t d = 0; d < dim; ++d) out[d] *= correction;
      max = score;
    }
    const double weight = std::exp(score - max);
    sum += weight;
    for (int64_t d = 0; d < dim; ++d) out[d] += weight * keep * v[d];
  }
};

float Saturate(double value) {
  constexpr double kLargest = std::numeric_limits<float>::max();
  return static_cast<float>(std::clamp(value, -kLargest, kLargest));
}

double ScoreOf(const AttentionProblem& problem, double product) {
  const double score = static_cast<double>(problem.softmax_scale) * product;
  if (problem.softcap == 0) return score;
  return static_cast<double>(problem.softcap) * std::tanh(score / problem.softcap);
}

bool WideRows::SeesKeys(const QueryRowId& row) const {
  const Band& band = call_.problem->bands[row.document];
  const RowRange runs = kv_.RunsOf(row.document);
  for (int64_t r = runs.begin; r < runs.end; ++r) {
    const RowRange keys =
        kv_.RowsAt(kv_.runs()[r], row.position + band.lower, row.position + band.upper);
    if (keys.size() > 0) return true;
  }
  return false;
}

bool WideRows::AddKey(const QueryRowId& row, const TokenRun& run, int64_t j, double product,
                      const float* v, bool poisoned, RowInDouble& sums) const {
  const AttentionProblem& problem = *call_.problem;
  if (!terms_.any()) {
    if (poisoned) return false;
    sums.Add(ScoreOf(problem, product), 1.0, v, problem.head_dim_v);
    return true;
  }
  const TermKeys key = terms_.KeysOf(kv_, run, call_.blocks[run.block], row.batch_index,
                                     j - run.local_begin, 1, /*positions=*/nullptr);
  const PairTerm term =
      terms_.TermOf({row.batch_index, row.head, row.local_row, row.document, row.position}, key);
  if (!term.visible) return true;
  if (poisoned) return false;
  double slope;
  const double score = terms_.ScoreOf(term, product, &slope);
  if (!std::isfinite(score)) return false;  // a bias that is NaN or infinite
  sums.Add(score, term.keep, v, problem.head_dim_v);
  return true;
}

bool WideRows::Attend(const QueryRowId& row, float* out, float* lse) {
  const AttentionProblem& problem = *call_.problem;
  const int64_t kv_head = row.head / (problem.num_heads / problem.num_kv_heads);
  float q[kMaxHeadDim], k[kMaxHeadDim], v[kMaxHeadDim];
  LoadRow(problem.dtype, call_.q,
          (row.batch_index * call_.q_rows + row.local_row) * problem.num_heads + row.head,
          problem.head_dim, q);
  if (!AllFinite(q, problem.head_dim)) return false;
  const auto round = [&](Float8Rows::Tensor tensor, float* values, int64_t dim) {
    if (float8_.any()) float8_.Round(tensor, row.batch_index, kv_head, values, dim);
  };
  round(Float8Rows::kQ, q, problem.head_dim);
  const Band& band = problem.bands[row.document];
  const RowRange runs = kv_.RunsOf(row.document);
  RowInDouble sums;
  for (int64_t r = runs.begin; r < runs.end; ++r) {
    const TokenRun& run = kv_.runs()[r];
    const KvBlock& block = call_.blocks[run.block];
    const RowRange keys = kv_.RowsAt(run, row.position + band.lower, row.position + band.upper);
    if (keys.size() <= 0) continue;
    const int64_t first = run.local_begin + keys.begin;
    const uint8_t* poison = PoisonOf(run.block).data() +
                            (row.batch_index * problem.num_kv_heads + kv_head) * block.rows;
    // Masked keys may hold any value.
    if (!terms_.masks() && std::memchr(poison + first, 1, keys.size()) != nullptr) return false;
    for (int64_t j = first; j < first + keys.size(); ++j) {
      const int64_t at = (row.batch_index * block.rows + j) * problem.num_kv_heads + kv_head;
      LoadRow(problem.dtype, block.k, at, problem.head_dim, k);
      LoadRow(problem.dtype, block.v, at, problem.head_dim_v, v);
      round(Float8Rows::kK, k, problem.head_dim);
      round(Float8Rows::kV, v, problem.head_dim_v);
      double product = 0;
      for (int64_t d = 0; d < problem.head_dim; ++d) product += static_cast<double>(q[d]) * k[d];
      if (!AddKey(row, run, j, product, v, poison[j] != 0, sums)) return false;
    }
  }
  if (sums.sum == 0) return false;
  for (int64_t d = 0; d < problem.head_dim_v; ++d) out[d] = Saturate(sums.out[d] / sums.sum);
  *lse = Saturate(sums.max + std::log(sums.sum));
  return true;
}

const std::vector<uint8_t>& WideRows::PoisonOf(int block) {
  std::call_once(once_, [this] { FindPoison(); });
  return poison_[block];
}

void WideRows::FindPoison() {
  const AttentionProblem& problem = *call_.problem;
  const int64_t heads = problem.num_kv_heads;
  float row[kMaxHeadDim];
  const auto finite = [&](const void* tensor, int64_t at, int64_t dim) {
    LoadRow(problem.dtype, tensor, at, dim, row);
    return AllFinite(row, dim);
  };
  for (const KvBlock& block : call_.blocks) {
    std::vector<uint8_t>& poison = poison_.emplace_back(problem.batch * heads * block.rows, 0);
    for (int64_t b = 0; b < problem.batch; ++b) {
      for (int64_t j = 0; j < block.rows; ++j) {
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t at = (b * block.rows + j) * heads + h;
          poison[(b * heads + h) * block.rows + j] =
              !finite(block.k, at, problem.head_dim) || !finite(block.v, at, problem.head_dim_v);
        }
      }
    }
  }
}

}  // namespace ringattn::worker::cpu
