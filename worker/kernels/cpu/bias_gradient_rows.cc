#include "worker/kernels/cpu/bias_gradient_rows.h"

#include "worker/kernels/cpu/simd/elementwise.h"
#include "worker/kernels/same_operands.h"

namespace ringattn::worker::cpu {

bool BackwardHasBiasGradient(const BackwardCall& call, const BiasGradientCall& gradient) {
  const AttentionProblem& problem = *call.problem;
  if (!problem.terms.bias.has_value() || !SameOperands(call, gradient)) return false;
  const BiasForm& bias = *problem.terms.bias;
  // A bias added after the softcap needs ds without the softcap's derivative, which the backward
  // lacks.
  return (bias.per_head || problem.num_heads == 1) && (bias.per_batch || problem.batch == 1) &&
         (bias.before_softcap || problem.softcap == 0);
}

BiasGradientRows::BiasGradientRows(const AttentionProblem& problem, int64_t q_rows, void* dbias)
    : problem_(problem), q_rows_(q_rows), dbias_(static_cast<char*>(dbias)) {}

void BiasGradientRows::Store(const TermRow& row, const TermKeys& keys, int begin, int end,
                             const float* ds) const {
  if (begin >= end) return;
  const ScoreTerms& terms = problem_.terms;
  const BiasForm& bias = *terms.bias;
  const DType dtype = bias.float32 ? DType::kFloat32 : problem_.dtype;
  const int64_t bytes = ElementBytes(dtype);
  const int64_t plane = PlaneOf(bias, problem_.num_heads, row.batch, row.head);
  const int64_t plane_row =
      plane * terms.PlaneRows(q_rows_) + terms.PairRow(row.local_row, row.position);
  char* target = dbias_ + plane_row * terms.columns * bytes;
  if (keys.plane_columns == nullptr) {
    return Convert(dtype, ds + begin, target + keys.PlaneColumnOf(begin) * bytes, end - begin);
  }
  for (int c = begin; c < end; ++c) {
    Convert(dtype, ds + c, target + keys.PlaneColumnOf(c) * bytes, 1);
  }
}

}  // namespace ringattn::worker::cpu
