// The oracle: attention and its gradients computed from the definition (docs/semantics.md), in
// fp64, one (i, j) pair at a time. It shares no code with kernels, bands, shards or schedules; it
// only reads their spec.
//
// Each exact value has three companions from which the comparator computes its bounds:
//   twin       the same computation with exp(s - m), p, ds and the result
//              rounded to the dtype where a tensor-core kernel rounds them (and
//              delta computed from the rounded out)
//   magnitude  the value's sum over absolute values of its terms. delta's terms
//              include delta's rounding error (delta comes from the rounded out,
//              however much it cancels); a term that fp16 stores as a subnormal
//              includes its possible loss
//   floor      the possible loss of fp32 arithmetic for every dtype (see below), and
//              half of fp16's smallest subnormal for results below 2^-14
//
// Usage for a whole small problem:
//   Result expected = EvaluateAll(spec, {.q = q, .k = k, .v = v, .dout = dout});
// Usage for samples of a large problem: EvaluateQueryRows first; once out and lse have passed
// there, EvaluateKeyRows may use the lse and delta of every row.
//
// Derivation of `floor`. Statistics are fp32 in every kernel. A score's error is of the order of
// 2^-24 * S, S = scale * sum |q||k|, as is the error of an lse near S; it multiplies p. dP and
// delta have errors of 2^-24 * sum |dout||v| and 2^-24 * sum |dout||out| even where they cancel,
// which they must do exactly if a row sees one key. Without these terms, scores of 1e4 or documents
// of one token would fail any fp32 kernel. floor sums these errors per term with the factor 2^-21,
// plus what fp32 may flush to zero of P and of the result (numeric.h).
//
// All functions are pure and thread safe. All memory is host memory.
#ifndef RINGATTN_COMMON_ORACLE_ORACLE_H_
#define RINGATTN_COMMON_ORACLE_ORACLE_H_

#include <cstdint>
#include <vector>

#include "common/attention/tensors.h"

namespace ringattn::oracle {

// Whole (global) tensors in the layouts of common/attention/attention_spec.h, in the spec's dtype.
// The caller owns them. `dout` is null if no gradients are computed.
struct Inputs {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  const void* dout = nullptr;
  const float* sinks = nullptr;  // if spec.options.sinks
  const float* dlse = nullptr;   // with dout, if spec.has_dlse
  // Set if the spec's options have them.
  const void* bias = nullptr;
  const uint8_t* mask = nullptr;
  const int32_t* q_segment_ids = nullptr;
  const int32_t* kv_segment_ids = nullptr;
};

// One row of a tensor: [batch][token][head]. `token` counts along the whole token axis (the packed
// axis if packed).
struct RowId {
  int64_t batch = 0;
  int64_t token = 0;
  int64_t head = 0;

  bool operator==(const RowId&) const = default;
};

// Rows of one tensor with their exact values and companions, each [rows.size()][dim].
//   lse            dim 1; exact may be -inf; magnitude is the row's S = max over the keys it sees
//                  of |scale| * sum |q||k| + |bias| + |ALiBi's term|, and |sink|; floor is what
//                  products in e4m3 may lose beyond fp32; twin is unused
//   dsinks         a row {0, 0, head} for each head, dim 1
//   dbias          a row of PairColumns for each batch row, query and head that the bias
//                  distinguishes (0 for the others)
//   probabilities  a row {0, index of the chosen row, head} of ProbabilityColumns; floor alone
//                  is its bound
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

// Tensors that were not requested stay empty. EvaluateAll returns the rows of out, dq, dk and dv in
// memory order (so `exact` is the tensor), and those of lse in the order of out's rows, not of
// lse's memory.
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

// Returns whether query position i of a document with sq queries and sk keys sees key position j of
// the same document.
bool Sees(const MaskRule& rule, int64_t sq, int64_t sk, int64_t i, int64_t j);

// Computes out and lse, the probabilities of spec.probability_rows, and dq, dk, dv, dsinks and
// dbias if inputs.dout is set. Cost: about 19 * head_dim multiply-adds per visible pair with
// gradients.
Result EvaluateAll(const AttentionSpec& spec, const Inputs& inputs);

// Computes out and lse of the given rows of q, and their dq if inputs.dout is set.
Result EvaluateQueryRows(const AttentionSpec& spec, const Inputs& inputs,
                         const std::vector<RowId>& rows);

// delta = sum over d of dout * out, less dlse (null: none), from given tensors in fp64. magnitude
// is sum |dout||out| + |dlse|. rounding is what kernels lose because they compute delta from a
// rounded out (as in RowDelta; no floor if out is given). All are [batch][num_heads][seq_len_q].
struct Delta {
  std::vector<double> value;
  std::vector<double> magnitude;
  std::vector<double> rounding;
  std::vector<double> floor;
};
Delta DeltaOf(const AttentionSpec& spec, const void* out, const void* dout, const float* dlse);

// Computes dk and dv of the given rows (head is a kv head) from `lse` [batch][num_heads][seq_len_q]
// and `delta`. The caller must have checked both.
Result EvaluateKeyRows(const AttentionSpec& spec, const Inputs& inputs,
                       const std::vector<RowId>& rows, const float* lse, const Delta& delta);

// Computes dsinks from the same inputs. REQUIRES: spec.options.sinks.
RowSet EvaluateSinkGradients(const AttentionSpec& spec, const float* sinks, const float* lse,
                             const Delta& delta);

// Computes the given rows of dbias. REQUIRES: inputs.dout and spec.options.bias with a gradient.
RowSet EvaluateBiasRows(const AttentionSpec& spec, const Inputs& inputs,
                        const std::vector<RowId>& rows);

// Computes the given rows of probabilities.
RowSet EvaluateProbabilities(const AttentionSpec& spec, const Inputs& inputs,
                             const std::vector<RowId>& rows);

// Returns `count` distinct rows (or all, if there are fewer), including the first and the last row,
// in ascending order. Deterministic for a `seed`.
std::vector<RowId> SampleQueryRows(const AttentionSpec& spec, int64_t count, uint64_t seed);
std::vector<RowId> SampleKeyRows(const AttentionSpec& spec, int64_t count, uint64_t seed);
std::vector<RowId> SampleBiasRows(const AttentionSpec& spec, int64_t count, uint64_t seed);
std::vector<RowId> SampleChosenRows(const AttentionSpec& spec, int64_t count, uint64_t seed);

}  // namespace ringattn::oracle

#endif  // RINGATTN_COMMON_ORACLE_ORACLE_H_
