// One query row in fp64: its scores and its contributions to every result. Private to this folder.
#ifndef RINGATTN_COMMON_ORACLE_QUERY_ROW_H_
#define RINGATTN_COMMON_ORACLE_QUERY_ROW_H_

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "common/oracle/pair_math.h"
#include "common/oracle/pair_terms.h"

namespace ringattn::oracle {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Magnitude for the linear bounds of a backward in a row of wide scores (backward_magnitude).
inline double LseLoss(double lse) { return std::abs(lse) < kWideScores ? std::abs(lse) : 0.0; }

// A key that a query row sees; the list has it as often as it counts.
struct VisibleKey {
  int64_t position;
  double score;
  double slope;
  double raw;          // the score before the softcap
  double keep;         // dropout's factor of the weight
  double doubt = 0.0;  // of p, in a row of wide scores
};

struct RowScores {
  std::vector<VisibleKey> keys;
  double sink = -kInfinity;      // none
  double max = -kInfinity;       // of the keys' scores
  double sum = 0.0;              // of exp(score - max) over the keys
  double score_magnitude = 0.0;  // S
  // part of S added after the softcap, which the softcap does not reduce
  double added_magnitude = 0.0;
  double float8_error = 0.0;  // e4m3 only: the maximum error of a score beyond fp32
  double keys_lse() const { return keys.empty() ? -kInfinity : max + std::log(sum); }
  double lse() const { return LogAddExp(keys_lse(), sink); }
  // The shares of the row's probability that the keys and the sink have.
  double keys_share() const { return keys.empty() ? 0.0 : std::exp(keys_lse() - lse()); }
  double sink_share() const { return sink == -kInfinity ? 0.0 : std::exp(sink - lse()); }
  bool wide() const { return score_magnitude >= kWideScores; }
  // Whether doubts bound p, and the magnitude for the linear bounds of ProbabilityTerm and
  // GradientTerm.
  bool coarse() const { return wide() || float8_error >= kFloat8CoarseError; }
  double linear_magnitude() const { return wide() ? 0.0 : score_magnitude; }
  // The same for backward. Its p is exp(score - lse) with an fp32 lse. Half a unit of lse's last
  // place, up to 2^-24 |lse|, affects every p of the row, including a key whose score far exceeds
  // all others. From |lse| of 2^17 on, score and lse round alike. The scores of a wide row may
  // cancel to a smaller lse.
  double backward_magnitude() const { return wide() ? LseLoss(lse()) : score_magnitude; }
};

// Computes each key's doubt. REQUIRES: row.coarse().
inline void DoubtRow(const AttentionOptions& options, RowScores& row) {
  const double lse = row.lse();
  const double raw_error = kFloat32Slack * row.score_magnitude + row.float8_error;
  const auto error_of = [&](const VisibleKey& key) {
    return kFloat32Slack * row.added_magnitude + CappedError(options, key.raw, raw_error);
  };
  double lse_error = 0.0;
  for (const VisibleKey& key : row.keys) lse_error = std::max(lse_error, error_of(key));
  const auto most_of = [&](const VisibleKey& key) {
    return MostProbability(key.score, lse, error_of(key) + lse_error);
  };
  double all = std::min(1.0, row.sink_share() * std::exp(lse_error));
  for (const VisibleKey& key : row.keys) all += most_of(key);
  for (VisibleKey& key : row.keys) {
    const double most = most_of(key);
    key.doubt = Doubt(std::exp(key.score - lse), most, all - most);
  }
}

inline void ScoreRow(const AttentionSpec& spec, const Document& document, const PairTerms& terms,
                     const QueryPosition& query, const double* q, double sink, HeadRows& k,
                     RowScores& row, const Float8Scales* float8 = nullptr) {
  row = {std::move(row.keys)};
  row.keys.clear();
  row.sink = sink;
  if (std::isfinite(sink)) row.score_magnitude = std::abs(sink);
  const double scale = std::abs(spec.options.softmax_scale);
  const int64_t kv_head = query.head / spec.shape.group_size();
  const auto scale_of = [&](TensorId tensor) {
    return float8 == nullptr ? 0.0 : float8->Of(tensor, query.batch, kv_head);
  };
  const double q_scale = scale_of(TensorId::kQ), k_scale = scale_of(TensorId::kK);
  double product_loss = 0.0;
  for (int64_t j = 0; j < document.k_length; ++j) {
    if (!Sees(document.rule, document.q_length, document.k_length, query.i, j)) continue;
    const PairContext pair = terms.Of(query, j);
    if (!pair.visible) continue;
    const Dot dot = DotOf(q, k.Row(j), spec.shape.head_dim);
    const Score score = ScoreOf(spec.options, dot.value, pair.before_softcap);
    const double value = score.value + pair.after_softcap;
    row.keys.insert(row.keys.end(), static_cast<size_t>(pair.times),
                    {.position = j,
                     .score = value,
                     .slope = score.slope,
                     .raw = spec.options.softmax_scale * dot.value + pair.before_softcap,
                     .keep = pair.keep});
    // std::max would drop a NaN.
    if (!(value <= row.max)) row.max = value;
    if (q_scale != 0.0) {
      product_loss = std::max(
          product_loss, Float8ProductLoss(q, q_scale, k.Row(j), k_scale, spec.shape.head_dim));
    }
    const double added = std::abs(pair.after_softcap);
    const double magnitude = scale * dot.magnitude + std::abs(pair.before_softcap) + added;
    if (!(magnitude <= row.score_magnitude)) row.score_magnitude = magnitude;
    row.added_magnitude = std::max(row.added_magnitude, added);
  }
  for (const VisibleKey& key : row.keys) row.sum += std::exp(key.score - row.max);
  if (q_scale != 0.0) {
    row.float8_error = kFloat8ScoreSlack * row.score_magnitude + scale * product_loss;
  }
}

// Computes one row of q against its keys: row `at` of out, lse and, with dout, dq. If dk and dv are
// given, adds this row's contributions to their rows kv_row(j). Not thread safe.
class QueryRow {
 public:
  // `float8` must outlive it; null or without scales if the spec does not compute in e4m3.
  QueryRow(const AttentionSpec& spec, const Document& document, const PairTerms& terms,
           const Float8Scales* float8 = nullptr)
      : spec_(spec), document_(document), terms_(terms), float8_(float8) {}

  //   sink  of the head, -inf if it has none
  void Forward(const QueryPosition& query, const double* q, double sink, HeadRows& k, HeadRows& v,
               Result& result, int64_t at) {
    ScoreRow(spec_, document_, terms_, query, q, sink, k, row_, float8_);
    if (row_.coarse()) DoubtRow(spec_.options, row_);
    const bool is_float8 = float8_ != nullptr && IsFloat8(spec_);
    // A large error is included in the keys' doubts.
    const double score_error = row_.coarse() ? 0.0 : row_.float8_error;
    // Kernels round p among the keys; the sink joins the finished row.
    const double share = row_.keys_share();
    const double rounding_scale = RoundingScaleOfRow();
    for (const VisibleKey& key : row_.keys) {
      const double stored = rounding_scale * std::exp(key.score - row_.max);
      Coefficients term = is_float8
                              ? Float8Term(std::exp(key.score - row_.max), row_.sum,
                                           row_.linear_magnitude(), score_error)
                              : ProbabilityTerm(spec_.dtype, stored, rounding_scale * row_.sum,
                                                row_.linear_magnitude(), key.keep);
      term = {term.exact * share, term.twin * share, term.magnitude * share, term.floor * share};
      term.floor += key.doubt * key.keep;
      Accumulate(term, v.Row(key.position), result.out, at);
    }
    if (is_float8 && !row_.keys.empty()) GrantTinyValues(query, share, result.out, at);
    FinishRow(spec_.result_dtype(), result.out, at);
    result.lse.floor[at] = row_.float8_error;
    result.lse.exact[at] = row_.lse();
    result.lse.magnitude[at] = row_.score_magnitude;
  }

  // REQUIRES: Forward has been called for the same row.
  //   dlse      of the row, 0 if there is none
  //   sink_row  row of result.dsinks that gets this row's term; -1: none
  //   bias_row  row of result.dbias that gets this row's terms; -1: none
  template <typename KvRow>
  void Backward(const double* q, const double* dout, double dlse, HeadRows& k, HeadRows& v,
                Result& result, int64_t at, int64_t sink_row, int64_t bias_row,
                const KvRow* kv_row) {
    const int64_t dim_v = spec_.shape.head_dim_v;
    const RowDelta delta = {
        DotOf(dout, &result.out.exact[at * dim_v], dim_v).value - dlse,
        DotOf(dout, &result.out.twin[at * dim_v], dim_v).value - dlse,
        DotOf(dout, &result.out.magnitude[at * dim_v], dim_v).magnitude + std::abs(dlse),
        DeltaRounding(SquaresOf(dout, &result.out.magnitude[at * dim_v]) + KeptSquares(dout, v)),
        DotOf(dout, &result.out.floor[at * dim_v], dim_v).magnitude};
    const double keys_share = row_.keys_share();
    // The error of delta, which is the sum of p dP.
    double delta_doubt = 0.0;
    if (row_.wide()) {
      for (const VisibleKey& key : row_.keys) {
        delta_doubt +=
            key.doubt * key.keep * std::abs(DotOf(dout, v.Row(key.position), dim_v).value);
      }
    }
    const double scale = spec_.options.softmax_scale;
    for (const VisibleKey& key : row_.keys) {
      const double p = std::exp(key.score - row_.max) / row_.sum * keys_share;
      Dot dp = DotOf(dout, v.Row(key.position), dim_v);
      dp = {dp.value * key.keep, dp.magnitude * key.keep};
      const auto term_of_ds = [&](double slope, double factor) {
        Coefficients ds =
            GradientTerm(spec_, p, dp, delta, slope, row_.backward_magnitude(), factor);
        ds.floor += std::abs(factor) * (key.doubt * (std::abs(dp.value) + std::abs(delta.value)) +
                                        (p + key.doubt) * delta_doubt);
        return ds;
      };
      const Coefficients ds = term_of_ds(key.slope, scale);
      Accumulate(ds, k.Row(key.position), result.dq, at);
      if (bias_row >= 0) {
        const double slope = spec_.options.bias->before_softcap ? key.slope : 1.0;
        AddToElement(term_of_ds(slope, 1.0), key.position, result.dbias, bias_row);
      }
      if (kv_row == nullptr) continue;
      Accumulate(ds, q, result.dk, (*kv_row)(key.position));
      Coefficients term = ProbabilityTerm(spec_.dtype, p, 1.0, row_.backward_magnitude(), key.keep);
      term.floor += key.doubt * key.keep;
      Accumulate(term, dout, result.dv, (*kv_row)(key.position));
    }
    FinishRow(spec_.result_dtype(), result.dq, at);
    if (sink_row < 0) return;
    // The share of the sink that the keys may take, or the reverse.
    double sink_doubt = 0.0;
    for (const VisibleKey& key : row_.keys) sink_doubt += key.doubt;
    const double p = row_.sink_share();
    AccumulateSink(p, delta, row_.linear_magnitude(), std::min(1.0, sink_doubt), result.dsinks,
                   sink_row);
    result.dsinks.floor[sink_row] += (p + sink_doubt) * delta_doubt;
  }

 private:
  // Adds the possible errors of v's tiniest values under another scale.
  void GrantTinyValues(const QueryPosition& query, double share, RowSet& out, int64_t at) const {
    const double loss = share * Float8TinyLoss(float8_->Of(TensorId::kV, query.batch,
                                                           query.head / spec_.shape.group_size()));
    for (int64_t d = at * out.dim; d < (at + 1) * out.dim; ++d) out.floor[d] += loss;
  }

  // Returns the factor of p where a kernel rounds it.
  double RoundingScaleOfRow() const {
    double keep = 0.0;
    for (const VisibleKey& key : row_.keys) keep = std::max(keep, key.keep);
    return RoundingScale(row_.sum, row_.keys.size(), keep == 0.0 ? 1.0 : keep);
  }

  // With dropout a row may keep only one key; then the rounding of its weight is the same in all of
  // out's elements and not independent. Sums the squares of each key's share of delta. A weight
  // among fp16's subnormals may be lost completely (DeltaRounding halves its argument).
  double KeptSquares(const double* dout, HeadRows& v) const {
    if (spec_.options.dropout.threshold == 0) return 0.0;
    const double scale = RoundingScaleOfRow();
    const double share = row_.keys_share() / (scale * row_.sum);
    double squares = 0.0;
    for (const VisibleKey& key : row_.keys) {
      const double dp = DotOf(dout, v.Row(key.position), spec_.shape.head_dim_v).value;
      const double stored = scale * std::exp(key.score - row_.max);
      const double lost = std::min(SubnormalLoss(spec_.dtype, stored), stored);
      const double weight = stored + 2.0 * lost / (8.0 * ToleranceUnit(spec_.dtype));
      const double term = weight * share * key.keep * dp;
      squares += term * term;
    }
    return squares;
  }

  double SquaresOf(const double* dout, const double* out_magnitude) const {
    double squares = 0.0;
    for (int64_t d = 0; d < spec_.shape.head_dim_v; ++d) {
      squares += dout[d] * out_magnitude[d] * dout[d] * out_magnitude[d];
    }
    return squares;
  }

  const AttentionSpec& spec_;
  const Document& document_;
  const PairTerms& terms_;
  const Float8Scales* const float8_;
  RowScores row_;
};

}  // namespace ringattn::oracle

#endif  // RINGATTN_COMMON_ORACLE_QUERY_ROW_H_
