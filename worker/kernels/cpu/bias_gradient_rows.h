// The bias's gradient from what a backward block has on its way, where no two pairs share an
// element of it: it costs a store then, instead of all scores once more (bias_gradient.h).
#ifndef RINGATTN_WORKER_KERNELS_CPU_BIAS_GRADIENT_ROWS_H_
#define RINGATTN_WORKER_KERNELS_CPU_BIAS_GRADIENT_ROWS_H_

#include <cstdint>

#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cpu/score_pass.h"

namespace ringattn::worker::cpu {

// Whether the backward has the elements of `gradient` one by one.
bool BackwardHasBiasGradient(const BackwardCall& call, const BiasGradientCall& gradient);

// The bias's gradient in memory; thread safe for different pairs.
class BiasGradientRows {
 public:
  //   dbias  as in BiasGradientCall; null if it is not requested
  BiasGradientRows(const AttentionProblem& problem, int64_t q_rows, void* dbias);

  bool wanted() const { return dbias_ != nullptr; }
  // Stores the columns [begin, end) of a row of a key tile.
  void Store(const TermRow& row, const TermKeys& keys, int begin, int end, const float* ds) const;

 private:
  const AttentionProblem& problem_;
  const int64_t q_rows_;
  char* const dbias_;
};

}  // namespace ringattn::worker::cpu

#endif  // RINGATTN_WORKER_KERNELS_CPU_BIAS_GRADIENT_ROWS_H_
