#include "worker/kernels/cpu/nonfinite_gradients.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "worker/kernels/cpu/nonfinite.h"
#include "worker/kernels/cpu/wide_rows.h"

namespace ringattn::worker::cpu {
namespace {

double DotOf(const float* a, const float* b, int count) {
  double sum = 0;
  for (int d = 0; d < count; ++d) sum += static_cast<double>(a[d]) * b[d];
  return sum;
}

}  // namespace

SourceRows NonfiniteGradients::BlockRows(const KeyTask& task, const QueryBlock& block,
                                         const void* tensor, int dim) const {
  const int64_t local = workspace.q.runs()[block.tile->run].local_begin + block.tile->begin;
  return RowsOfHeads(problem.dtype, tensor, task.batch_index, call.q_rows, problem.num_heads, dim,
                     block.first_head, block.heads, local, block.tile->rows);
}

bool NonfiniteGradients::IsHidden(const QueryBlock& block, int m, int j) const {
  return block.add[int64_t{m} * key_tile + j] == -std::numeric_limits<float>::infinity();
}

NonfiniteGradients::PairGradient NonfiniteGradients::GradientOfPair(
    const KeyTask& task, const QueryBlock& block, int m, int j, const float* q, const float* k,
    const float* dout, const float* v) const {
  const double product = DotOf(q, k, static_cast<int>(problem.head_dim));
  double slope = 1.0, keep = 1.0, score;
  if (terms.any()) {
    const TokenRun& run = workspace.q.runs()[block.tile->run];
    const int row = m / block.heads;
    const TermRow place{task.batch_index, block.first_head + m % block.heads,
                        run.local_begin + block.tile->begin + row, run.document,
                        workspace.q.PositionOf(run, block.tile->begin + row)};
    const PairTerm term = terms.TermOf(place, task.keys_at.At(j));
    score = Saturate(terms.ScoreOf(term, product, &slope));
    keep = term.keep;
  } else {
    score = Saturate(ScoreOf(problem, product));
    const double t = problem.softcap > 0 ? score / problem.softcap : 0.0;
    slope = 1 - t * t;
  }
  // The score is rounded as lse has been.
  const double p = std::exp(std::min(0.0, score - block.lse[m]));
  const double dp = DotOf(dout, v, static_cast<int>(problem.head_dim_v));
  return {p * keep, p * (dp * keep - block.delta[m]) * slope};
}

// The same pair by pair, for blocks with masks and values that are not finite.
void NonfiniteGradients::AddVisibleGradients(KeyTask& task, QueryBlock& block) const {
  const int head_dim = static_cast<int>(problem.head_dim);
  const int head_dim_v = static_cast<int>(problem.head_dim_v);
  std::fill_n(block.dq, int64_t{block.rows} * cols, 0.0f);
  const SourceRows q = BlockRows(task, block, call.q, head_dim);
  const SourceRows dout = BlockRows(task, block, call.dout, head_dim_v);
  const int per_word = ops.elements_per_word;
  for (int m = 0; m < block.rows; ++m) {
    // Words along the rows: (m, j) is element m % per_word of word (m / per_word, j).
    const int64_t row = int64_t{m / per_word} * key_tile;
    for (int j = block.visible_begin[m]; j < block.visible_end[m]; ++j) {
      if (terms.masks() && IsHidden(block, m, j)) continue;
      const int64_t element = (row + j) * per_word + m % per_word;
      const float p = PackedElement(ops, block.p, element);
      const float ds = PackedElement(ops, block.ds, element);
      AddWeightedRow(dout, m, p, task.element_row, task.dv + int64_t{j} * cols_v);
      AddWeightedRow(q, m, ds, task.element_row, task.dk + int64_t{j} * cols);
      AddWeightedRow(task.k_rows, j, ds, task.element_row, block.dq + int64_t{m} * cols);
    }
  }
}

// The same in double, for blocks whose products may not fit fp32.
void NonfiniteGradients::AddWideGradients(KeyTask& task, QueryBlock& block) const {
  const int head_dim = static_cast<int>(problem.head_dim);
  const int head_dim_v = static_cast<int>(problem.head_dim_v);
  std::fill_n(block.dq, int64_t{block.rows} * cols, 0.0f);
  const SourceRows q_rows = BlockRows(task, block, call.q, head_dim);
  const SourceRows dout_rows = BlockRows(task, block, call.dout, head_dim_v);
  float q[kMaxHeadDim], dout[kMaxHeadDim], k[kMaxHeadDim], v[kMaxHeadDim];
  const auto add = [](double factor, const float* source, float* target, int count) {
    for (int d = 0; d < count; ++d) target[d] = Saturate(target[d] + factor * source[d]);
  };
  for (int m = 0; m < block.rows; ++m) {
    LoadRow(q_rows, m, q);
    LoadRow(dout_rows, m, dout);
    for (int j = block.visible_begin[m]; j < block.visible_end[m]; ++j) {
      if (terms.masks() && IsHidden(block, m, j)) continue;
      LoadRow(task.k_rows, j, k);
      LoadRow(task.v_rows, j, v);
      const PairGradient pair = GradientOfPair(task, block, m, j, q, k, dout, v);
      const double p = pair.p, ds = pair.ds;
      add(p, dout, task.dv + int64_t{j} * cols_v, head_dim_v);
      add(ds, q, task.dk + int64_t{j} * cols, head_dim);
      add(ds, k, block.dq + int64_t{m} * cols, head_dim);
    }
  }
}

void NonfiniteGradients::MendScoreGradients(const KeyTask& task, const QueryBlock& block,
                                            int m) const {
  float q[kMaxHeadDim], dout[kMaxHeadDim], k[kMaxHeadDim], v[kMaxHeadDim];
  LoadRow(BlockRows(task, block, call.q, static_cast<int>(problem.head_dim)), m, q);
  LoadRow(BlockRows(task, block, call.dout, static_cast<int>(problem.head_dim_v)), m, dout);
  float* row = block.dp + int64_t{m} * key_tile;
  for (int j = block.visible_begin[m]; j < block.visible_end[m]; ++j) {
    if (std::isfinite(row[j])) continue;
    LoadRow(task.k_rows, j, k);
    LoadRow(task.v_rows, j, v);
    const double ds = GradientOfPair(task, block, m, j, q, k, dout, v).ds;
    if (std::isfinite(ds)) row[j] = Saturate(ds);
  }
}

}  // namespace ringattn::worker::cpu
