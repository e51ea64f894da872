// Rows whose fp32 arithmetic left its range although all that they see is finite: done
// again in double. Elements of bf16 and fp32 reach 3.4e38, so products of two need not
// fit fp32, and neither need unnormalised sums of values.
#ifndef RINGATTN_WORKER_KERNELS_CPU_WIDE_ROWS_H_
#define RINGATTN_WORKER_KERNELS_CPU_WIDE_ROWS_H_

#include <cstdint>
#include <mutex>
#include <vector>

#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cpu/float8_rows.h"
#include "worker/kernels/cpu/score_pass.h"
#include "worker/kernels/cpu/workspace/token_runs.h"

namespace ringattn::worker::cpu {

// The nearest fp32 that is finite; NaN stays NaN.
float Saturate(double value);

// The score of a product of q and k as the problem defines it.
double ScoreOf(const AttentionProblem& problem, double product);

// A row of q, by where it lies.
struct QueryRowId {
  int64_t batch_index = 0;
  int64_t head = 0;
  int64_t local_row = 0;
  int64_t document = 0;
  int64_t position = 0;
};

// For the rows of one call. Thread safe.
class WideRows {
 public:
  // All outlive the object. kv: the runs of call.blocks, by document.
  WideRows(const ForwardCall& call, const TokenRuns& kv, const ScorePass& terms,
           const Float8Rows& float8)
      : call_(call), kv_(kv), terms_(terms), float8_(float8) {}

  // By the band alone.
  bool SeesKeys(const QueryRowId& row) const;

  // out [head_dim_v], normalised, and lse of the row over the call's keys that it sees; an
  // lse beyond fp32 is the largest there is. False, with nothing written, if the row sees
  // no key, or anything that it sees is NaN or infinite: then fp32's result stands.
  bool Attend(const QueryRowId& row, float* out, float* lse);

 private:
  struct RowInDouble;

  // Adds local row j of a run's block if the row sees it. False: a NaN or an infinity is seen.
  bool AddKey(const QueryRowId& row, const TokenRun& run, int64_t j, double product, const float* v,
              bool poisoned, RowInDouble& sums) const;

  // One byte for each row of k and v, [batch][kv_head][row]: 1 if one is not finite.
  // Made when first needed.
  const std::vector<uint8_t>& PoisonOf(int block);
  void FindPoison();

  const ForwardCall& call_;
  const TokenRuns& kv_;
  const ScorePass& terms_;
  const Float8Rows& float8_;
  std::once_flag once_;
  std::vector<std::vector<uint8_t>> poison_;  // by block
};

}  // namespace ringattn::worker::cpu

#endif  // RINGATTN_WORKER_KERNELS_CPU_WIDE_ROWS_H_
