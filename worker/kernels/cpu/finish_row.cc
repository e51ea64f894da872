#include "worker/kernels/cpu/finish_row.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "common/attention/merge.h"
#include "worker/kernels/cpu/simd/elementwise.h"
#include "worker/kernels/cpu/wide_rows.h"

namespace ringattn::worker::cpu {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();
constexpr double kLn2 = 0.69314718055994530942;

// sum is relative to 2^shift, and shift a rounded product: the exact product
// counts, or lse would be off by the rounding of scores of 1e4.
// A wide sum is relative to the exact power itself. What fp32 cannot hold becomes the
// largest that it can, so that partials still merge and backward still subtracts.
float LogSumExp(const ScoreScale& scale, float max, float sum) {
  const float shift = max * scale.to_log2;
  const double base = double{max} * scale.natural + std::log(double{sum});
  if (IsWide(shift)) return Saturate(base);
  const double rounding = double{max} * scale.to_log2 - shift;
  return static_cast<float>(base - rounding * kLn2);
}

}  // namespace

void FinishRow(const ForwardCall& call, const ScoreScale& scale, int64_t batch_index, int64_t head,
               int64_t local_row, const RowSums& sums, float* temporary) {
  const AttentionProblem& problem = *call.problem;
  const DType out_dtype = problem.out_dtype();
  const int64_t dim = problem.head_dim_v;
  const int64_t at = ((batch_index * call.q_rows + local_row) * problem.num_heads + head) * dim;
  float& lse = call.lse[(batch_index * problem.num_heads + head) * call.q_rows + local_row];
  char* out = call.final ? static_cast<char*>(call.out) + at * ElementBytes(out_dtype) : nullptr;
  float* out_acc = call.out_acc == nullptr ? nullptr : call.out_acc + at;
  float* target = out_acc;
  if (call.final) {
    target = out_dtype == DType::kFloat32 ? reinterpret_cast<float*>(out) : temporary;
  }
  const float* const sink = call.final && call.sinks != nullptr ? call.sinks + head : nullptr;
  const float previous_lse = call.initial ? kNegativeInfinity : lse;
  if (sums.sum == 0.0f) {
    if (!call.initial && sink == nullptr) {
      if (call.final) Convert(out_dtype, out_acc, out, dim);
      return;
    }
    if (call.initial) {
      std::fill_n(target, dim, 0.0f);
    } else {
      Scale(1.0f, out_acc, target, dim);
    }
    lse = previous_lse;
  } else {
    const float own_lse = sums.lse.has_value() ? *sums.lse : LogSumExp(scale, sums.max, sums.sum);
    if (previous_lse == kNegativeInfinity) {
      Scale(1.0f / sums.sum, sums.out, target, dim);
      lse = own_lse;
    } else {
      const MergeWeights merged = MergeLse(previous_lse, own_lse);
      Combine(merged.first, out_acc, merged.second / sums.sum, sums.out, target, dim);
      lse = merged.lse;
    }
  }
  if (sink != nullptr && *sink != kNegativeInfinity) {
    const MergeWeights joined = MergeLse(lse, *sink);
    Scale(joined.first, target, target, dim);
    lse = joined.lse;
  }
  if (target == temporary) Convert(out_dtype, temporary, out, dim);
}

void FinishRowsOutsidePieces(const ForwardCall& call, const TokenRuns& q) {
  if (!call.initial && !call.final) return;
  std::vector<std::pair<int64_t, int64_t>> covered;
  for (const TokenRun& run : q.runs()) {
    covered.emplace_back(run.local_begin, run.local_begin + run.length);
  }
  covered.emplace_back(call.q_rows, call.q_rows);
  std::sort(covered.begin(), covered.end());
  float temporary[kMaxHeadDim];
  int64_t next = 0;
  for (const auto& [begin, end] : covered) {
    for (; next < begin; ++next) {
      for (int64_t b = 0; b < call.problem->batch; ++b) {
        for (int64_t h = 0; h < call.problem->num_heads; ++h) {
          FinishRow(call, ScoreScale{}, b, h, next, RowSums{}, temporary);
        }
      }
    }
    next = std::max(next, end);
  }
}

}  // namespace ringattn::worker::cpu
