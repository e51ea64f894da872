#include "common/oracle/oracle.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "common/oracle/pair_math.h"

namespace ringattn::oracle {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// What the linear grants of backward are taken of in a row of wide scores (backward_magnitude).
double LseLoss(double lse) { return std::abs(lse) < kWideScores ? std::abs(lse) : 0.0; }

// The keys that one query row sees.
struct VisibleKey {
  int64_t position;
  double score;
  double slope;
  double raw;          // the score before the softcap
  double doubt = 0.0;  // of p, in a row of wide scores
};

struct RowScores {
  std::vector<VisibleKey> keys;
  double sink = -kInfinity;      // none
  double max = -kInfinity;       // of the keys' scores
  double sum = 0.0;              // of exp(score - max) over the keys
  double score_magnitude = 0.0;  // S
  double keys_lse() const { return keys.empty() ? -kInfinity : max + std::log(sum); }
  double lse() const { return LogAddExp(keys_lse(), sink); }
  // What of the row's probability the keys have together, and what the sink has.
  double keys_share() const { return keys.empty() ? 0.0 : std::exp(keys_lse() - lse()); }
  double sink_share() const { return sink == -kInfinity ? 0.0 : std::exp(sink - lse()); }
  bool wide() const { return score_magnitude >= kWideScores; }
  // What the linear grants of ProbabilityTerm and GradientTerm are taken of.
  double linear_magnitude() const { return wide() ? 0.0 : score_magnitude; }
  // The same for backward. Its p is exp(score - lse), of an lse that is fp32: half a unit of its
  // last place, up to 2^-24 |lse|, is lost of every p of the row, also of a key that none comes
  // near. Only from |lse| of 2^17 on do score and lse have to be rounded alike. Scores of a wide
  // row may cancel to less.
  double backward_magnitude() const { return wide() ? LseLoss(lse()) : score_magnitude; }
};

// Fills in each key's doubt. REQUIRES: row.wide().
void DoubtRow(const AttentionOptions& options, RowScores& row) {
  const double lse = row.lse();
  double lse_error = 0.0;
  for (const VisibleKey& key : row.keys) {
    lse_error = std::max(lse_error, ScoreError(options, key.raw, row.score_magnitude));
  }
  const auto most_of = [&](const VisibleKey& key) {
    const double error = ScoreError(options, key.raw, row.score_magnitude);
    return MostProbability(key.score, lse, error + lse_error);
  };
  double all = std::min(1.0, row.sink_share() * std::exp(lse_error));
  for (const VisibleKey& key : row.keys) all += most_of(key);
  for (VisibleKey& key : row.keys) {
    const double most = most_of(key);
    key.doubt = Doubt(std::exp(key.score - lse), most, all - most);
  }
}

void ScoreRow(const AttentionSpec& spec, const Document& document, const double* q, int64_t i,
              double sink, HeadRows& k, RowScores& row) {
  row = {std::move(row.keys)};
  row.keys.clear();
  row.sink = sink;
  if (std::isfinite(sink)) row.score_magnitude = std::abs(sink);
  const double scale = std::abs(spec.options.softmax_scale);
  for (int64_t j = 0; j < document.k_length; ++j) {
    if (!Sees(document.rule, document.q_length, document.k_length, i, j)) continue;
    const Dot dot = DotOf(q, k.Row(j), spec.shape.head_dim);
    const Score score = ScoreOf(spec.options, dot.value);
    row.keys.push_back({.position = j,
                        .score = score.value,
                        .slope = score.slope,
                        .raw = spec.options.softmax_scale * dot.value});
    // Not std::max: a NaN must get through.
    if (!(score.value <= row.max)) row.max = score.value;
    if (!(scale * dot.magnitude <= row.score_magnitude)) {
      row.score_magnitude = scale * dot.magnitude;
    }
  }
  for (const VisibleKey& key : row.keys) row.sum += std::exp(key.score - row.max);
}

// One row of q against its keys: fills row `at` of out, lse and, with dout, dq.
// Where dk and dv are given they receive this row's contributions, at rows
// kv_row(j).
class QueryRow {
 public:
  QueryRow(const AttentionSpec& spec, const Document& document)
      : spec_(spec), document_(document) {}

  //   sink  of the head, -inf if it has none
  void Forward(const double* q, int64_t i, double sink, HeadRows& k, HeadRows& v, Result& result,
               int64_t at) {
    ScoreRow(spec_, document_, q, i, sink, k, row_);
    if (row_.wide()) DoubtRow(spec_.options, row_);
    // Kernels round p among the keys; the sink joins the finished row.
    const double share = row_.keys_share();
    const double rounding_scale = RoundingScale(row_.sum, row_.keys.size());
    for (const VisibleKey& key : row_.keys) {
      const double stored = rounding_scale * std::exp(key.score - row_.max);
      Coefficients term =
          ProbabilityTerm(spec_.dtype, stored, rounding_scale * row_.sum, row_.linear_magnitude());
      term = {term.exact * share, term.twin * share, term.magnitude * share, term.floor * share};
      term.floor += key.doubt;
      Accumulate(term, v.Row(key.position), result.out, at);
    }
    FinishRow(spec_.result_dtype(), result.out, at);
    result.lse.exact[at] = row_.lse();
    result.lse.magnitude[at] = row_.score_magnitude;
  }

  // REQUIRES: Forward has been called for the same row.
  //   dlse      of the row, 0 if there is none
  //   sink_row  of result.dsinks, that gets this row's term; -1: none
  template <typename KvRow>
  void Backward(const double* q, const double* dout, double dlse, HeadRows& k, HeadRows& v,
                Result& result, int64_t at, int64_t sink_row, const KvRow* kv_row) {
    const int64_t dim_v = spec_.shape.head_dim_v;
    const RowDelta delta = {
        DotOf(dout, &result.out.exact[at * dim_v], dim_v).value - dlse,
        DotOf(dout, &result.out.twin[at * dim_v], dim_v).value - dlse,
        DotOf(dout, &result.out.magnitude[at * dim_v], dim_v).magnitude + std::abs(dlse),
        DeltaRounding(SquaresOf(dout, &result.out.magnitude[at * dim_v])),
        DotOf(dout, &result.out.floor[at * dim_v], dim_v).magnitude};
    const double keys_share = row_.keys_share();
    // Of delta, which is the sum of p dP.
    double delta_doubt = 0.0;
    if (row_.wide()) {
      for (const VisibleKey& key : row_.keys) {
        delta_doubt += key.doubt * std::abs(DotOf(dout, v.Row(key.position), dim_v).value);
      }
    }
    const double scale = std::abs(spec_.options.softmax_scale);
    for (const VisibleKey& key : row_.keys) {
      const double p = std::exp(key.score - row_.max) / row_.sum * keys_share;
      const Dot dp = DotOf(dout, v.Row(key.position), dim_v);
      Coefficients ds = GradientTerm(spec_, p, dp, delta, key.slope, row_.backward_magnitude());
      ds.floor += scale * (key.doubt * (std::abs(dp.value) + std::abs(delta.value)) +
                           (p + key.doubt) * delta_doubt);
      Accumulate(ds, k.Row(key.position), result.dq, at);
      if (kv_row == nullptr) continue;
      Accumulate(ds, q, result.dk, (*kv_row)(key.position));
      Coefficients term = ProbabilityTerm(spec_.dtype, p, 1.0, row_.backward_magnitude());
      term.floor += key.doubt;
      Accumulate(term, dout, result.dv, (*kv_row)(key.position));
    }
    FinishRow(spec_.result_dtype(), result.dq, at);
    if (sink_row < 0) return;
    // What of the sink's share the keys may take, or it of theirs.
    double sink_doubt = 0.0;
    for (const VisibleKey& key : row_.keys) sink_doubt += key.doubt;
    const double p = row_.sink_share();
    AccumulateSink(p, delta, row_.linear_magnitude(), std::min(1.0, sink_doubt), result.dsinks,
                   sink_row);
    result.dsinks.floor[sink_row] += (p + sink_doubt) * delta_doubt;
  }

 private:
  double SquaresOf(const double* dout, const double* out_magnitude) const {
    double squares = 0.0;
    for (int64_t d = 0; d < spec_.shape.head_dim_v; ++d) {
      squares += dout[d] * out_magnitude[d] * dout[d] * out_magnitude[d];
    }
    return squares;
  }

  const AttentionSpec& spec_;
  const Document& document_;
  RowScores row_;
};

void FinishAll(DType dtype, RowSet& set) {
  const int64_t rows = static_cast<int64_t>(set.rows.size());
  for (int64_t row = 0; row < rows; ++row) FinishRow(dtype, set, row);
}

struct NoKvRow {
  int64_t operator()(int64_t) const { return 0; }
};

double SinkOf(const AttentionSpec& spec, const Inputs& inputs, int64_t head) {
  return spec.options.sinks ? inputs.sinks[head] : -kInfinity;
}

// Of a query row, by its place in lse.
double DlseOf(const AttentionSpec& spec, const Inputs& inputs, const RowId& row) {
  if (!spec.has_dlse) return 0.0;
  return inputs
      .dlse[(row.batch * spec.shape.num_heads + row.head) * spec.shape.seq_len_q + row.token];
}

std::vector<RowId> AllRows(int64_t batch, int64_t tokens, int64_t heads) {
  std::vector<RowId> rows;
  rows.reserve(batch * tokens * heads);
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t h = 0; h < heads; ++h) rows.push_back({b, t, h});
    }
  }
  return rows;
}

// The document that holds `token` of an axis.
int64_t DocumentOf(const std::vector<int64_t>& cu_seqlens, int64_t token) {
  int64_t document = 0;
  while (cu_seqlens[document + 1] <= token) ++document;
  return document;
}

std::vector<RowId> SampleRows(int64_t batch, int64_t tokens, int64_t heads, int64_t count,
                              uint64_t seed) {
  const int64_t total = batch * tokens * heads;
  if (count >= total) return AllRows(batch, tokens, heads);
  std::vector<int64_t> chosen = {0, total - 1};
  uint64_t state = seed;
  while (static_cast<int64_t>(chosen.size()) < count) {
    // Weyl sequence with a mixing step: any well spread sequence will do.
    state += 0x9E3779B97F4A7C15u;
    uint64_t mixed = (state ^ state >> 32) * 0xD6E8FEB86659FD93u;
    mixed ^= mixed >> 32;
    const int64_t index = static_cast<int64_t>(mixed % static_cast<uint64_t>(total));
    if (std::find(chosen.begin(), chosen.end(), index) == chosen.end()) chosen.push_back(index);
  }
  chosen.resize(std::max<int64_t>(count, 0));
  std::sort(chosen.begin(), chosen.end());
  std::vector<RowId> rows;
  for (const int64_t index : chosen) {
    rows.push_back({index / (tokens * heads), index / heads % tokens, index % heads});
  }
  return rows;
}

}  // namespace

void RowSet::Resize(std::vector<RowId> row_ids, int64_t row_dim) {
  rows = std::move(row_ids);
  dim = row_dim;
  const size_t size = rows.size() * static_cast<size_t>(dim);
  exact.assign(size, 0.0);
  twin.assign(size, 0.0);
  magnitude.assign(size, 0.0);
  floor.assign(size, 0.0);
}

bool Sees(const MaskRule& rule, int64_t sq, int64_t sk, int64_t i, int64_t j) {
  const int64_t aligned = i + sk - sq;  // bottom-right alignment
  if (rule.causal && j > aligned) return false;
  if (rule.window_left >= 0 && aligned - j > rule.window_left) return false;
  if (rule.window_right >= 0 && j - aligned > rule.window_right) return false;
  return true;
}

Result EvaluateAll(const AttentionSpec& spec, const Inputs& inputs) {
  const AttentionShape& shape = spec.shape;
  const int64_t heads = shape.num_heads, kv_heads = shape.num_kv_heads;
  const int64_t sq = shape.seq_len_q, sk = shape.seq_len_kv;
  const bool gradients = inputs.dout != nullptr;
  Result result;
  result.out.Resize(AllRows(shape.batch, sq, heads), shape.head_dim_v);
  result.lse.Resize(result.out.rows, 1);
  if (gradients) {
    result.dq.Resize(result.out.rows, shape.head_dim);
    result.dk.Resize(AllRows(shape.batch, sk, kv_heads), shape.head_dim);
    result.dv.Resize(result.dk.rows, shape.head_dim_v);
    if (spec.options.sinks) result.dsinks.Resize(AllRows(1, 1, heads), 1);
  }
  const std::vector<Document> documents = DocumentsOf(spec);
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (const Document& document : documents) {
      QueryRow row(spec, document);
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t hk = h / shape.group_size();
        const auto rows_of = [&](const void* data, bool kv, int64_t dim) {
          return HeadRows(spec.dtype, data, kv ? sk : sq, kv ? kv_heads : heads, dim, b,
                          kv ? hk : h, kv ? document.k_begin : document.q_begin,
                          kv ? document.k_length : document.q_length, /*decode_all=*/true);
        };
        HeadRows q = rows_of(inputs.q, false, shape.head_dim);
        HeadRows k = rows_of(inputs.k, true, shape.head_dim);
        HeadRows v = rows_of(inputs.v, true, shape.head_dim_v);
        // Decoded row by row: without gradients there is nothing behind it.
        HeadRows dout(spec.dtype, inputs.dout, sq, heads, shape.head_dim_v, b, h, document.q_begin,
                      document.q_length, /*decode_all=*/false);
        const auto kv_row = [&](int64_t j) {
          return (b * sk + document.k_begin + j) * kv_heads + hk;
        };
        for (int64_t i = 0; i < document.q_length; ++i) {
          const int64_t at = (b * sq + document.q_begin + i) * heads + h;
          row.Forward(q.Row(i), i, SinkOf(spec, inputs, h), k, v, result, at);
          if (!gradients) continue;
          row.Backward(q.Row(i), dout.Row(i), DlseOf(spec, inputs, result.out.rows[at]), k, v,
                       result, at, spec.options.sinks ? h : -1, &kv_row);
        }
      }
    }
  }
  FinishAll(spec.result_dtype(), result.dk);
  FinishAll(spec.result_dtype(), result.dv);
  FinishSinkGradients(result.dsinks);
  return result;
}

Result EvaluateQueryRows(const AttentionSpec& spec, const Inputs& inputs,
                         const std::vector<RowId>& rows) {
  const AttentionShape& shape = spec.shape;
  const bool gradients = inputs.dout != nullptr;
  Result result;
  result.out.Resize(rows, shape.head_dim_v);
  result.lse.Resize(rows, 1);
  if (gradients) result.dq.Resize(rows, shape.head_dim);
  const std::vector<Document> documents = DocumentsOf(spec);
  for (size_t at = 0; at < rows.size(); ++at) {
    const RowId& id = rows[at];
    const Document& document = documents[DocumentOf(shape.cu_seqlens_q, id.token)];
    const int64_t i = id.token - document.q_begin;
    const int64_t hk = id.head / shape.group_size();
    const auto one = [&](const void* data, bool kv, int64_t dim) {
      return HeadRows(spec.dtype, data, kv ? shape.seq_len_kv : shape.seq_len_q,
                      kv ? shape.num_kv_heads : shape.num_heads, dim, id.batch, kv ? hk : id.head,
                      kv ? document.k_begin : document.q_begin,
                      kv ? document.k_length : document.q_length, /*decode_all=*/false);
    };
    HeadRows q = one(inputs.q, false, shape.head_dim);
    HeadRows k = one(inputs.k, true, shape.head_dim);
    HeadRows v = one(inputs.v, true, shape.head_dim_v);
    QueryRow row(spec, document);
    row.Forward(q.Row(i), i, SinkOf(spec, inputs, id.head), k, v, result, static_cast<int64_t>(at));
    if (!gradients) continue;
    HeadRows dout = one(inputs.dout, false, shape.head_dim_v);
    row.Backward<NoKvRow>(q.Row(i), dout.Row(i), DlseOf(spec, inputs, id), k, v, result,
                          static_cast<int64_t>(at), /*sink_row=*/-1, nullptr);
  }
  return result;
}

Delta DeltaOf(const AttentionSpec& spec, const void* out, const void* dout, const float* dlse) {
  const AttentionShape& shape = spec.shape;
  Delta delta;
  delta.value.assign(shape.batch * shape.num_heads * shape.seq_len_q, 0.0);
  delta.rounding = delta.magnitude = delta.floor = delta.value;
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t t = 0; t < shape.seq_len_q; ++t) {
      for (int64_t h = 0; h < shape.num_heads; ++h) {
        const int64_t row = (b * shape.seq_len_q + t) * shape.num_heads + h;
        const int64_t element = row * shape.head_dim_v;
        const int64_t at = (b * shape.num_heads + h) * shape.seq_len_q + t;
        double squares = 0.0;
        for (int64_t d = 0; d < shape.head_dim_v; ++d) {
          const double product =
              Load(spec.result_dtype(), out, element + d) * Load(spec.dtype, dout, element + d);
          delta.value[at] += product;
          delta.magnitude[at] += std::abs(product);
          squares += product * product;
        }
        delta.rounding[at] = DeltaRounding(squares);
        if (dlse == nullptr) continue;
        delta.value[at] -= dlse[at];
        delta.magnitude[at] += std::abs(double{dlse[at]});
      }
    }
  }
  return delta;
}

Result EvaluateKeyRows(const AttentionSpec& spec, const Inputs& inputs,
                       const std::vector<RowId>& rows, const float* lse, const Delta& delta) {
  const AttentionShape& shape = spec.shape;
  const DType dtype = spec.dtype;
  const int64_t group = shape.group_size();
  const double scale = spec.options.softmax_scale;
  Result result;
  result.dk.Resize(rows, shape.head_dim);
  result.dv.Resize(rows, shape.head_dim_v);
  const std::vector<Document> documents = DocumentsOf(spec);
  for (size_t index = 0; index < rows.size(); ++index) {
    const RowId& id = rows[index];
    const int64_t at = static_cast<int64_t>(index);
    const Document& document = documents[DocumentOf(shape.cu_seqlens_k, id.token)];
    const int64_t j = id.token - document.k_begin;
    const auto one = [&](const void* data, bool kv, int64_t dim, int64_t head) {
      return HeadRows(dtype, data, kv ? shape.seq_len_kv : shape.seq_len_q,
                      kv ? shape.num_kv_heads : shape.num_heads, dim, id.batch, head,
                      kv ? document.k_begin : document.q_begin,
                      kv ? document.k_length : document.q_length, /*decode_all=*/false);
    };
    HeadRows k_rows = one(inputs.k, true, shape.head_dim, id.head);
    HeadRows v_rows = one(inputs.v, true, shape.head_dim_v, id.head);
    const double* k = k_rows.Row(j);
    const double* v = v_rows.Row(j);
    for (int64_t h = id.head * group; h < (id.head + 1) * group; ++h) {
      HeadRows q_rows = one(inputs.q, false, shape.head_dim, h);
      HeadRows dout_rows = one(inputs.dout, false, shape.head_dim_v, h);
      for (int64_t i = 0; i < document.q_length; ++i) {
        if (!Sees(document.rule, document.q_length, document.k_length, i, j)) continue;
        const int64_t statistic =
            (id.batch * shape.num_heads + h) * shape.seq_len_q + document.q_begin + i;
        const double* q = q_rows.Row(i);
        const double* dout = dout_rows.Row(i);
        const Dot dot = DotOf(q, k, shape.head_dim);
        const Score score = ScoreOf(spec.options, dot.value);
        const double row_lse = lse[statistic];
        if (row_lse == -kInfinity) continue;
        const double p = std::exp(score.value - row_lse);
        const Dot dp = DotOf(dout, v, shape.head_dim_v);
        // Stands for the row's S, which would need all its keys.
        const double score_size = std::max(std::abs(scale) * dot.magnitude, std::abs(row_lse));
        const RowDelta row_delta = {delta.value[statistic], delta.value[statistic],
                                    delta.magnitude[statistic], /*rounding=*/0.0, /*floor=*/0.0};
        const bool wide = score_size >= kWideScores;
        // What the row's other keys can take is not known here: all of it.
        const double error = 2.0 * ScoreError(spec.options, scale * dot.value, score_size);
        const double doubt =
            wide ? Doubt(p, MostProbability(score.value, row_lse, error), 1.0) : 0.0;
        const double linear_size = wide ? LseLoss(row_lse) : score_size;
        Coefficients ds = GradientTerm(spec, p, dp, row_delta, score.slope, linear_size);
        ds.floor += std::abs(scale) * doubt * (std::abs(dp.value) + std::abs(row_delta.value));
        Coefficients term = ProbabilityTerm(dtype, p, 1.0, linear_size);
        term.floor += doubt;
        Accumulate(ds, q, result.dk, at);
        Accumulate(term, dout, result.dv, at);
      }
    }
  }
  FinishAll(spec.result_dtype(), result.dk);
  FinishAll(spec.result_dtype(), result.dv);
  return result;
}

RowSet EvaluateSinkGradients(const AttentionSpec& spec, const float* sinks, const float* lse,
                             const Delta& delta) {
  const AttentionShape& shape = spec.shape;
  RowSet result;
  result.Resize(AllRows(1, 1, shape.num_heads), 1);
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t h = 0; h < shape.num_heads; ++h) {
      const double sink = sinks[h];
      if (sink == -kInfinity) continue;
      for (int64_t i = 0; i < shape.seq_len_q; ++i) {
        const int64_t at = (b * shape.num_heads + h) * shape.seq_len_q + i;
        const RowDelta row = {delta.value[at], delta.value[at], delta.magnitude[at],
                              delta.rounding[at], delta.floor[at]};
        // |lse| and |sink| stand for the row's S, which would need all its keys.
        const double size = std::max(std::abs(sink), std::abs(double{lse[at]}));
        const bool wide = size >= kWideScores;
        const double p = std::exp(sink - lse[at]);
        AccumulateSink(p, row, wide ? 0.0 : size, wide ? 1.0 : 0.0, result, h);
      }
    }
  }
  FinishSinkGradients(result);
  return result;
}

std::vector<RowId> SampleQueryRows(const AttentionSpec& spec, int64_t count, uint64_t seed) {
  return SampleRows(spec.shape.batch, spec.shape.seq_len_q, spec.shape.num_heads, count, seed);
}

std::vector<RowId> SampleKeyRows(const AttentionSpec& spec, int64_t count, uint64_t seed) {
  return SampleRows(spec.shape.batch, spec.shape.seq_len_kv, spec.shape.num_kv_heads, count, seed);
}

}  // namespace ringattn::oracle
