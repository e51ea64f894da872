#include "worker/kernels/cpu/float8_rows.h"

#include <algorithm>
#include <cmath>

#include "worker/kernels/cpu/simd/elementwise.h"
#include "worker/kernels/cpu/workspace/workspace.h"
#include "worker/kernels/e4m3.h"

namespace ringattn::worker::cpu {
namespace {

// The largest finite magnitude of the rows that pieces name, of `heads` heads from `head` on, in a
// tensor [batch, rows, all_heads, dim].
float LargestOfPieces(DType dtype, const void* tensor, int64_t batch, int64_t rows,
                      const std::vector<Piece>& pieces, int64_t all_heads, int64_t head,
                      int64_t heads, int64_t dim) {
  float row[kMaxHeadDim];
  float largest = 0.0f;
  for (const Piece& piece : pieces) {
    for (int64_t r = piece.local_begin; r < piece.local_begin + piece.length; ++r) {
      for (int64_t h = head; h < head + heads; ++h) {
        const int64_t at = ((batch * rows + r) * all_heads + h) * dim;
        ConvertToFloat(dtype, static_cast<const char*>(tensor) + at * ElementBytes(dtype), row,
                       dim);
        for (int64_t d = 0; d < dim; ++d) {
          const float size = std::abs(row[d]);
          if (std::isfinite(size)) largest = std::max(largest, size);
        }
      }
    }
  }
  return largest;
}

void RoundRow(float down, float up, float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) values[i] = RoundToE4m3(values[i] * down) * up;
}

}  // namespace

float Float8Rows::LargestOf(Tensor tensor, int64_t batch, int64_t kv_head) const {
  const AttentionProblem& problem = *call_.problem;
  if (tensor == kQ) {
    const int64_t group = problem.num_heads / problem.num_kv_heads;
    return LargestOfPieces(problem.dtype, call_.q, batch, call_.q_rows, call_.q_pieces,
                           problem.num_heads, kv_head * group, group, problem.head_dim);
  }
  float largest = 0.0f;
  for (const KvBlock& block : call_.blocks) {
    largest =
        std::max(largest, LargestOfPieces(problem.dtype, tensor == kK ? block.k : block.v, batch,
                                          block.rows, block.pieces, problem.num_kv_heads, kv_head,
                                          1, tensor == kK ? problem.head_dim : problem.head_dim_v));
  }
  return largest;
}

void Float8Rows::FindScales(ThreadPool& pool) {
  const int64_t heads = call_.problem->batch * call_.problem->num_kv_heads;
  exponents_.assign(3 * heads, 0);
  pool.ParallelFor(3 * heads, [&](int, int64_t task) {
    const int64_t head = task % heads;
    exponents_[task] = ScaleExponent(LargestOf(static_cast<Tensor>(task / heads),
                                               head / call_.problem->num_kv_heads,
                                               head % call_.problem->num_kv_heads));
  });
}

int Float8Rows::ExponentOf(Tensor tensor, int64_t batch, int64_t kv_head) const {
  const AttentionProblem& problem = *call_.problem;
  return exponents_[(tensor * problem.batch + batch) * problem.num_kv_heads + kv_head];
}

SourceRows Float8Rows::Rounded(Tensor tensor, int64_t batch, int64_t kv_head,
                               const SourceRows& source, float* buffer) const {
  for (int r = 0; r < source.rows; ++r) {
    const char* row =
        static_cast<const char*>(source.data) + source.RowOffset(r) * ElementBytes(source.dtype);
    float* const target = buffer + int64_t{r} * source.cols;
    ConvertToFloat(source.dtype, row, target, source.cols);
    Round(tensor, batch, kv_head, target, source.cols);
  }
  return {DType::kFloat32, buffer, source.cols, source.rows, source.cols};
}

void Float8Rows::Round(Tensor tensor, int64_t batch, int64_t kv_head, float* values,
                       int64_t count) const {
  const int exponent = ExponentOf(tensor, batch, kv_head);
  RoundRow(std::ldexp(1.0f, -exponent), std::ldexp(1.0f, exponent), values, count);
}

void Float8Rows::RoundProbabilities(float* values, int begin, int end) {
  for (int i = begin; i < end; ++i) values[i] = RoundProbability(values[i]);
}

}  // namespace ringattn::worker::cpu
