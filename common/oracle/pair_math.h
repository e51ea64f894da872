// The oracle's arithmetic per pair (i, j) and its access to typed tensors. Private to this folder.
#ifndef RINGATTN_COMMON_ORACLE_PAIR_MATH_H_
#define RINGATTN_COMMON_ORACLE_PAIR_MATH_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "common/attention/tensors.h"
#include "common/oracle/float8.h"
#include "common/oracle/numeric.h"
#include "common/oracle/oracle.h"

namespace ringattn::oracle {

// Eight fp32 roundings per quantity, which floor permits (see oracle.h).
inline constexpr double kFloat32Slack = 0x1p-21;

// Rows of one head of one document, as doubles. Small tensors are decoded once. Large ones are
// decoded row by row; the result of Row() is then valid until the next call.
class HeadRows {
 public:
  // The tensor is [batch][tokens][heads][dim]; positions count from `begin`. With a scale
  // (Float8Scales) rows are rounded to e4m3.
  HeadRows(DType dtype, const void* data, int64_t tokens, int64_t heads, int64_t dim, int64_t batch,
           int64_t head, int64_t begin, int64_t length, bool decode_all, double float8_scale = 0.0)
      : dtype_(dtype),
        data_(data),
        first_(((batch * tokens + begin) * heads + head) * dim),
        stride_(heads * dim),
        dim_(dim),
        decoded_(decode_all),
        float8_scale_(float8_scale) {
    values_.resize((decode_all ? length : 1) * dim);
    if (!decode_all) return;
    for (int64_t row = 0; row < length; ++row) Decode(row, &values_[row * dim]);
  }

  const double* Row(int64_t position) {
    if (decoded_) return &values_[position * dim_];
    Decode(position, values_.data());
    return values_.data();
  }

 private:
  void Decode(int64_t position, double* target) const {
    LoadMany(dtype_, data_, first_ + position * stride_, dim_, target);
    if (float8_scale_ == 0.0) return;
    for (int64_t d = 0; d < dim_; ++d) {
      const double rounded = RoundToE4m3(target[d] / float8_scale_) * float8_scale_;
      target[d] = std::isinf(rounded) ? std::nan("") : rounded;
    }
  }

  DType dtype_;
  const void* data_;
  int64_t first_;
  int64_t stride_;
  int64_t dim_;
  bool decoded_;
  double float8_scale_;
  std::vector<double> values_;
};

// Returns the maximum change of a product of the two rows if they are rounded by another scale than
// the oracle's.
inline double Float8ProductLoss(const double* q, double q_scale, const double* k, double k_scale,
                                int64_t dim) {
  double loss = 0.0;
  for (int64_t d = 0; d < dim; ++d) {
    // A tiny value may have been rounded to 0 here.
    const double q_loss = std::abs(q[d]) <= 0x1p-6 * q_scale ? Float8TinyLoss(q_scale) : 0.0;
    const double k_loss = std::abs(k[d]) <= 0x1p-6 * k_scale ? Float8TinyLoss(k_scale) : 0.0;
    loss += q_loss * (std::abs(k[d]) + k_loss) + k_loss * std::abs(q[d]);
  }
  return loss;
}

struct Document {
  int64_t q_begin, q_length, k_begin, k_length;
  MaskRule rule;
};

inline std::vector<Document> DocumentsOf(const AttentionSpec& spec) {
  const AttentionShape& shape = spec.shape;
  const AttentionOptions& options = spec.options;
  const MaskRule common = {options.causal, options.window_left, options.window_right};
  std::vector<Document> documents;
  for (int64_t d = 0; d + 1 < static_cast<int64_t>(shape.cu_seqlens_q.size()); ++d) {
    const int64_t q = shape.cu_seqlens_q[d], k = shape.cu_seqlens_k[d];
    documents.push_back({q, shape.cu_seqlens_q[d + 1] - q, k, shape.cu_seqlens_k[d + 1] - k,
                         shape.document_rules.empty() ? common : shape.document_rules[d]});
  }
  return documents;
}

struct Dot {
  double value = 0.0;
  double magnitude = 0.0;  // the same sum over absolute values
};

inline Dot DotOf(const double* a, const double* b, int64_t dim) {
  // Four independent sums, because one would wait for every addition.
  double value[4] = {}, magnitude[4] = {};
  int64_t d = 0;
  for (; d + 4 <= dim; d += 4) {
    for (int lane = 0; lane < 4; ++lane) {
      const double product = a[d + lane] * b[d + lane];
      value[lane] += product;
      magnitude[lane] += std::abs(product);
    }
  }
  for (; d < dim; ++d) {
    value[0] += a[d] * b[d];
    magnitude[0] += std::abs(a[d] * b[d]);
  }
  return {(value[0] + value[1]) + (value[2] + value[3]),
          (magnitude[0] + magnitude[1]) + (magnitude[2] + magnitude[3])};
}

// Coefficients of a term in each of a RowSet's four sums.
struct Coefficients {
  double exact, twin, magnitude, floor;
};

// row += coefficients * x, with |x| in the last two sums.
inline void Accumulate(const Coefficients& c, const double* x, RowSet& set, int64_t row) {
  const int64_t dim = set.dim, base = row * dim;
  double* __restrict exact = &set.exact[base];
  double* __restrict twin = &set.twin[base];
  double* __restrict magnitude = &set.magnitude[base];
  double* __restrict floor = &set.floor[base];
  for (int64_t d = 0; d < dim; ++d) {
    const double absolute = std::abs(x[d]);
    exact[d] += c.exact * x[d];
    twin[d] += c.twin * x[d];
    magnitude[d] += c.magnitude * absolute;
    floor[d] += c.floor * absolute;
  }
}

// The same for a single element of a row.
inline void AddToElement(const Coefficients& c, int64_t column, RowSet& set, int64_t row) {
  const int64_t at = row * set.dim + column;
  set.exact[at] += c.exact;
  set.twin[at] += c.twin;
  set.magnitude[at] += c.magnitude;
  set.floor[at] += c.floor;
}

// Rounds the twins and adds to the floor what storing the results may lose to underflow; this loss
// does not depend on the size of the row. A partial sum of a tiny result may be a subnormal, which
// GPUs flush; that loses less than 2^-126.
inline void FinishRow(DType dtype, RowSet& set, int64_t row) {
  for (int64_t at = row * set.dim; at < (row + 1) * set.dim; ++at) {
    set.twin[at] = RoundTo(dtype, set.twin[at]);
    set.floor[at] += ResultLoss(dtype, set.exact[at]) + Float32Flush(set.exact[at]);
    if (set.exact[at] != 0.0 && std::abs(set.exact[at]) < 0x1p-96) set.floor[at] += 0x1p-126;
  }
}

// A score after the softcap, and its derivative with respect to the score before it.
struct Score {
  double value;
  double slope;
};

//   bias  added before the softcap
inline Score ScoreOf(const AttentionOptions& options, double dot, double bias = 0.0) {
  const double score = options.softmax_scale * dot + bias;
  if (options.softcap == 0.0) return {score, 1.0};
  const double t = std::tanh(score / options.softcap);
  // 1 - t^2 without cancellation.
  const double cosh = std::cosh(std::min(std::abs(score / options.softcap), 350.0));
  return {options.softcap * t, 1.0 / (cosh * cosh)};
}

// Returns the factor of p in what the twin rounds. A kernel rounds exp(s - m) with a running
// maximum m that may differ from the row's, so it rounds p times a factor that is usually not a
// power of two. The twin uses the fraction of 1 / sum as this factor. If all `keys` scores are
// equal, one unlucky fraction would affect the whole row; the twin then uses a factor that both
// bf16 and fp16 round by 0.4 units. The rounded value includes dropout's factor `keep`, which is 1
// without dropout.
inline double RoundingScale(double sum, size_t keys, double keep) {
  if (keys > 1 && sum > static_cast<double>(keys) * (1.0 - 1e-9)) {
    return 0.5 * (1.0 + 51.425 / 128.0) / keep;
  }
  int exponent;
  return std::frexp(1.0 / sum, &exponent);
}

// From this value on a row's S is wide: the errors of fp32 scores, of the order of 2^-24 S, are no
// longer small relative to p, and Doubt bounds p.
inline constexpr double kWideScores = 0x1p17;

// Returns the error of a score after the softcap, given the score before it (`raw`) and its error.
// A saturated softcap removes the error.
inline double CappedError(const AttentionOptions& options, double raw, double error) {
  const double c = options.softcap;
  if (c == 0.0) return error;
  const double size = std::abs(raw);
  return c * (std::tanh((size + error) / c) - std::tanh((size - error) / c) + kFloat32Slack);
}

// The same for the fp32 error 2^-21 S.
inline double ScoreError(const AttentionOptions& options, double raw, double score_magnitude) {
  return CappedError(options, raw, kFloat32Slack * score_magnitude);
}

// Returns the largest p that a key with this score can have if the total error of score and lse is
// `error`.
inline double MostProbability(double score, double lse, double error) {
  return std::exp(std::min(0.0, score - lse + error));
}

// Returns the maximum error of p in a row of wide scores. p may grow to `most`. It may shrink only
// by the share that the row's other keys can take, `others` in total: a key whose score far exceeds
// all others keeps its p.
inline double Doubt(double p, double most, double others) {
  return std::max(most - p, std::min(p, others));
}

// Returns p's term in out and dv. A kernel rounds `stored` * `keep` to the dtype, or it rounds
// `stored` and multiplies the row's sum by `keep` (which also multiplies the loss of a subnormal).
// `stored` / `divisor` == p. `keep` is dropout's factor: 0 or 1 / (1 - rate), and 1 without
// dropout. `score_magnitude` is the row's S.
inline Coefficients ProbabilityTerm(DType dtype, double stored, double divisor,
                                    double score_magnitude, double keep = 1.0) {
  const double p = stored / divisor;
  const double kept = stored * keep;
  return {p * keep, RoundTo(dtype, kept) / divisor,
          p * keep + std::min(SubnormalLoss(dtype, stored), stored) * keep / divisor /
                         (8.0 * ToleranceUnit(dtype)),
          (kFloat32Slack * (1.0 + score_magnitude) * p + Float32Flush(p)) * keep};
}

// The same in e4m3. `stored`, relative to the row's largest, is rounded with an offset of 2^8;
// `sum` is the sum of unrounded values; `score_error` is the maximum error of scores.
inline Coefficients Float8Term(double stored, double sum, double score_magnitude,
                               double score_error) {
  const double p = stored / sum;
  const double loss = std::min(p, kFloat8WeightLoss / sum) + 2.0 * score_error * p;
  return {p, RoundToE4m3(0x1p8 * stored) / (0x1p8 * sum), p + loss / (8.0 * kFloat8Unit),
          kFloat32Slack * (1.0 + score_magnitude) * p + Float32Flush(p)};
}

// delta of one query row: exact, from the rounded out, and with absolute values. `rounding` and
// `floor` are the losses of a delta from the rounded out: in units of 8u, and from out's floor.
struct RowDelta {
  double value, twin, magnitude, rounding, floor;
};

// The errors of out's elements are independent and at most 2u of out each, so their sum with dout
// has the size of a 2-norm; 4u of it exceeds four standard deviations.
//   squares  the sum of (dout * out)^2 over the row
inline double DeltaRounding(double squares) { return 0.5 * std::sqrt(squares); }

// Returns ln(exp(a) + exp(b)); either may be -inf. Returns a unchanged if b is -inf.
inline double LogAddExp(double a, double b) {
  const double high = std::max(a, b);
  if (std::isinf(high)) return high;
  return high + std::log1p(std::exp(std::min(a, b) - high));
}

// Adds one query row's term of its head's dsinks: -p delta with p = exp(sink - lse). The rounding
// errors of the rows' deltas are independent, so their squares add up: magnitude holds squares
// until FinishSinkGradients.
//   score_magnitude  the row's S, 0 where it is wide
//   doubt            the maximum error of p in a wide row
inline void AccumulateSink(double p, const RowDelta& delta, double score_magnitude, double doubt,
                           RowSet& set, int64_t row) {
  const double size = std::abs(delta.value);
  const double loss = p * delta.rounding;
  set.exact[row] -= p * delta.value;
  set.twin[row] -= p * delta.twin;
  set.magnitude[row] += loss * loss;
  set.floor[row] +=
      p * (delta.floor + kFloat32Slack * (delta.magnitude + (1.0 + score_magnitude) * size)) +
      (doubt + Float32Flush(p)) * size;
}

inline void FinishSinkGradients(RowSet& set) {
  for (size_t row = 0; row < set.rows.size(); ++row) {
    set.magnitude[row] = std::sqrt(set.magnitude[row]);
    FinishRow(DType::kFloat32, set, static_cast<int64_t>(row));
  }
}

// Returns ds's term in its products: dq and dk with the softmax scale, dbias with factor 1.
//   factor  the scale
inline Coefficients GradientTerm(const AttentionSpec& spec, double p, const Dot& dp,
                                 const RowDelta& delta, double slope, double score_magnitude,
                                 double factor) {
  const double scale = factor;
  const double ds = p * (dp.value - delta.value) * slope;
  const double ds_twin = p * (dp.value - delta.twin) * slope;
  const double size = std::abs(dp.value) + std::abs(delta.value);
  const double loss = std::min(SubnormalLoss(spec.dtype, ds), p * (size + delta.rounding)) /
                      (8.0 * ToleranceUnit(spec.dtype));
  const double noise = p * (dp.magnitude + delta.magnitude + size * score_magnitude);
  // Dropout may leave a row with only light keys. Then out is as small as its storage error, and so
  // is delta relative to p.
  const double delta_floor = spec.options.dropout.threshold != 0 ? p * delta.floor : 0.0;
  return {scale * ds, scale * RoundTo(spec.dtype, ds_twin),
          std::abs(scale) * (p * (size + delta.rounding) * slope + loss),
          std::abs(scale) * (kFloat32Slack * noise + Float32Flush(p) * size + delta_floor)};
}

}  // namespace ringattn::oracle

#endif  // RINGATTN_COMMON_ORACLE_PAIR_MATH_H_
