// The oracle: attention and its gradients straight from the definition
// (docs/semantics.md), in fp64, one (i, j) pair at a time. It shares no code
// with kernels, bands, shards or schedules; it only reads their spec.
//
// Beside each exact value stand the yardsticks that the comparator judges by:
//   twin       the same computation with exp(s - m), p, ds and the result
//              rounded to the dtype where a tensor-core kernel rounds them (and
//              delta taken from the rounded out)
//   magnitude  the value's own sum with every term's absolute value; delta's
//              terms count with delta's rounding too (it comes from the rounded
//              out, however much it cancels), a term that fp16 stores as a
//              subnormal with what that may lose
//   floor      what fp32 arithmetic may lose whatever the dtype (see below), and
//              half of fp16's smallest subnormal for results below 2^-14
//
// Usage, everything of a small problem:
//   Result expected = EvaluateAll(spec, {.q = q, .k = k, .v = v, .dout = dout});
// Usage, samples of a large one: EvaluateQueryRows first; once out and lse have
// passed there, EvaluateKeyRows may trust the lse and delta of every row.
//
// About `floor`. Statistics are fp32 in every kernel. A score's error is of the
// order of 2^-24 * S, S = scale * sum |q||k| (so is that of an lse near S), and
// multiplies p; dP and delta carry 2^-24 * sum |dout||v| and 2^-24 * sum
// |dout||out| even where they cancel, as they must exactly when a row sees one
// key. Scores of 1e4 or documents of one token would otherwise fail any fp32
// kernel. floor sums these per term with the factor 2^-21, plus what fp32 may
// flush to zero of P and of the result (numeric.h).
//
// All functions are pure and thread safe. Host memory throughout.
#ifndef RINGATTN_COMMON_ORACLE_ORACLE_H_
#define RINGATTN_COMMON_ORACLE_ORACLE_H_

#include <cstdint>
#include <vector>

#include "common/attention/tensors.h"

namespace ringattn::oracle {

// Whole (global) tensors in the layouts of common/attention/attention_spec.h, the spec's
// dtype; the caller owns them. `dout` is null when no gradients are wanted.
struct Inputs {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  const void* dout = nullptr;
  const float* sinks = nullptr;  // where spec.options.sinks
  const float* dlse = nullptr;   // with dout, where spec.has_dlse
  // Where the spec's options have them.
  const void* bias = nullptr;
  const uint8_t* mask = nullptr;
  const int32_t* q_segment_ids = nullptr;
  const int32_t* kv_segment_ids = nullptr;
};

// One row of a tensor: [batch][token][head], `token` counts along the whole
// token axis (the packed axis when packed).
struct RowId {
  int64_t batch = 0;
  int64_t token = 0;
  int64_t head = 0;

  bool operator==(const RowId&) const = default;
};

// Rows of one tensor with their exact values and yardsticks, each
// [rows.size()][dim]. For lse: dim 1, exact may be -inf, magnitude is the row's
// S = max over the keys it sees of |scale| * sum |q||k| + |bias| + |ALiBi's term|, and |sink|;
// floor is what products in e4m3 may lose beyond fp32; twin unused. For dsinks: a row {0, 0, head}
// for each head, dim 1. For dbias: a row of PairColumns for each batch row, query and head that the
// bias tells apart (0 for those it does not). For probabilities: a row {0, number of the chosen
// row, head} of ProbabilityColumns, whose bound is its floor alone.
struct RowSet {
  std::vector<RowId> rows;
  int64_t dim = 0;
  std::vector<double> exact;
  std::vector<double> twin;
  std::vector<double> magnitude;
  std::vector<double> floor;

  bool empty() const { return rows.empty(); }
  void Resize(std::vector<RowId> row_ids, int64_t row_dim);
};

// What was not asked for stays empty. From EvaluateAll the rows of out, dq, dk,
// dv are in memory order (so `exact` is the tensor); those of lse are in the
// order of out's rows, not of lse's memory.
struct Result {
  RowSet out;
  RowSet lse;
  RowSet dq;
  RowSet dk;
  RowSet dv;
  RowSet dsinks;
  RowSet dbias;
  RowSet probabilities;
};

// True if query position i of a document with sq queries and sk keys sees key
// position j of the same document.
bool Sees(const MaskRule& rule, int64_t sq, int64_t sk, int64_t i, int64_t j);

// Everything: out and lse, the probabilities of spec.probability_rows, and dq, dk, dv, dsinks,
// dbias if inputs.dout is set. Cost: about 19 * head_dim multiply-adds per visible pair with
// gradients.
Result EvaluateAll(const AttentionSpec& spec, const Inputs& inputs);

// out and lse of the given rows of q, and their dq if inputs.dout is set.
Result EvaluateQueryRows(const AttentionSpec& spec, const Inputs& inputs,
                         const std::vector<RowId>& rows);

// delta = sum over d of dout * out, less dlse (null: none), its magnitude sum |dout||out| +
// |dlse|, and what it loses because kernels take it from a rounded out (as RowDelta has it;
// no floor where out is given), all [batch][num_heads][seq_len_q], in fp64 from given tensors.
struct Delta {
  std::vector<double> value;
  std::vector<double> magnitude;
  std::vector<double> rounding;
  std::vector<double> floor;
};
Delta DeltaOf(const AttentionSpec& spec, const void* out, const void* dout, const float* dlse);

// dk and dv of the given rows (head is a kv head), trusting `lse`
// [batch][num_heads][seq_len_q] and `delta`, which the caller has checked.
Result EvaluateKeyRows(const AttentionSpec& spec, const Inputs& inputs,
                       const std::vector<RowId>& rows, const float* lse, const Delta& delta);

// dsinks, trusting the same. REQUIRES: spec.options.sinks.
RowSet EvaluateSinkGradients(const AttentionSpec& spec, const float* sinks, const float* lse,
                             const Delta& delta);

// The given rows of dbias. REQUIRES: inputs.dout and spec.options.bias with a gradient.
RowSet EvaluateBiasRows(const AttentionSpec& spec, const Inputs& inputs,
                        const std::vector<RowId>& rows);

// The given rows of probabilities.
RowSet EvaluateProbabilities(const AttentionSpec& spec, const Inputs& inputs,
                             const std::vector<RowId>& rows);

// `count` distinct rows (all, if there are fewer), the first and the last row
// among them, in ascending order. Deterministic from `seed`.
std::vector<RowId> SampleQueryRows(const AttentionSpec& spec, int64_t count, uint64_t seed);
std::vector<RowId> SampleKeyRows(const AttentionSpec& spec, int64_t count, uint64_t seed);
std::vector<RowId> SampleBiasRows(const AttentionSpec& spec, int64_t count, uint64_t seed);
std::vector<RowId> SampleChosenRows(const AttentionSpec& spec, int64_t count, uint64_t seed);

}  // namespace ringattn::oracle

#endif  // RINGATTN_COMMON_ORACLE_ORACLE_H_
