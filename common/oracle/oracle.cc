#include "common/oracle/oracle.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "common/oracle/in_parallel.h"
#include "common/oracle/pair_math.h"
#include "common/oracle/pair_terms.h"
#include "common/oracle/query_row.h"

namespace ringattn::oracle {
namespace {

void FinishAll(DType dtype, RowSet& set) {
  const int64_t rows = static_cast<int64_t>(set.rows.size());
  for (int64_t row = 0; row < rows; ++row) FinishRow(dtype, set, row);
}

struct NoKvRow {
  int64_t operator()(int64_t) const { return 0; }
};

bool HasBiasGradient(const AttentionSpec& spec) {
  return spec.options.bias.has_value() && spec.options.bias->gradient;
}

// The shape of dbias's rows as [batch][token][head].
int64_t BiasBatch(const AttentionSpec& spec) {
  return spec.options.bias->per_batch ? spec.shape.batch : 1;
}
int64_t BiasHeads(const AttentionSpec& spec) {
  return spec.options.bias->per_head ? spec.shape.num_heads : 1;
}

double SinkOf(const AttentionSpec& spec, const Inputs& inputs, int64_t head) {
  return spec.options.sinks ? inputs.sinks[head] : -kInfinity;
}

// Returns the dlse of a query row.
double DlseOf(const AttentionSpec& spec, const Inputs& inputs, const RowId& row) {
  if (!spec.has_dlse) return 0.0;
  return inputs
      .dlse[(row.batch * spec.shape.num_heads + row.head) * spec.shape.seq_len_q + row.token];
}

// Returns the cost of a row with `others` counterparts, in multiplications.
double RowCost(const AttentionShape& shape, int64_t others) {
  return static_cast<double>(others) * static_cast<double>(shape.head_dim + shape.head_dim_v);
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

// Returns the document that holds `token` of an axis.
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
    // A Weyl sequence with a mixing step; any well spread sequence works.
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

namespace {

// Relative error of exp(score - lse) in fp32, for scores of 1: the permitted error of lse
// (comparator.h) and that of the score.
constexpr double kProbabilityLoss = 5e-6;

}  // namespace

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
    if (HasBiasGradient(spec)) {
      result.dbias.Resize(AllRows(BiasBatch(spec), sq, BiasHeads(spec)), PairColumns(shape));
    }
  }
  const PairTerms terms(spec, inputs);
  const Float8Scales float8(spec, inputs);
  const std::vector<Document> documents = DocumentsOf(spec);
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (size_t d = 0; d < documents.size(); ++d) {
      const Document& document = documents[d];
      QueryRow row(spec, document, terms, &float8);
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t hk = h / shape.group_size();
        const auto rows_of = [&](TensorId tensor, const void* data, bool kv, int64_t dim) {
          return HeadRows(spec.dtype, data, kv ? sk : sq, kv ? kv_heads : heads, dim, b,
                          kv ? hk : h, kv ? document.k_begin : document.q_begin,
                          kv ? document.k_length : document.q_length, /*decode_all=*/true,
                          float8.Of(tensor, b, hk));
        };
        HeadRows q = rows_of(TensorId::kQ, inputs.q, false, shape.head_dim);
        HeadRows k = rows_of(TensorId::kK, inputs.k, true, shape.head_dim);
        HeadRows v = rows_of(TensorId::kV, inputs.v, true, shape.head_dim_v);
        // Decoded row by row, because nothing is reused without gradients.
        HeadRows dout(spec.dtype, inputs.dout, sq, heads, shape.head_dim_v, b, h, document.q_begin,
                      document.q_length, /*decode_all=*/false);
        const auto kv_row = [&](int64_t j) {
          return (b * sk + document.k_begin + j) * kv_heads + hk;
        };
        for (int64_t i = 0; i < document.q_length; ++i) {
          const int64_t at = (b * sq + document.q_begin + i) * heads + h;
          row.Forward({b, static_cast<int64_t>(d), h, i}, q.Row(i), SinkOf(spec, inputs, h), k, v,
                      result, at);
          if (!gradients) continue;
          const int64_t bias_row =
              HasBiasGradient(spec) ? BiasRow(spec, b, document.q_begin + i, h) : -1;
          row.Backward(q.Row(i), dout.Row(i), DlseOf(spec, inputs, result.out.rows[at]), k, v,
                       result, at, spec.options.sinks ? h : -1, bias_row, &kv_row);
        }
      }
    }
  }
  FinishAll(spec.result_dtype(), result.dk);
  FinishAll(spec.result_dtype(), result.dv);
  FinishSinkGradients(result.dsinks);
  if (!result.dbias.empty()) FinishAll(DTypeOf(spec, TensorId::kDbias), result.dbias);
  if (!spec.probability_rows.empty()) {
    const auto rows = static_cast<int64_t>(spec.probability_rows.size());
    result.probabilities = EvaluateProbabilities(spec, inputs, AllRows(1, rows, heads));
  }
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
  const PairTerms terms(spec, inputs);
  const Float8Scales float8(spec, inputs);
  InParallel(static_cast<int64_t>(rows.size()), RowCost(shape, shape.seq_len_kv), [&](int64_t at) {
    const RowId& id = rows[at];
    const int64_t d = DocumentOf(shape.cu_seqlens_q, id.token);
    const Document& document = documents[d];
    const int64_t i = id.token - document.q_begin;
    const int64_t hk = id.head / shape.group_size();
    const auto one = [&](TensorId tensor, const void* data, bool kv, int64_t dim) {
      return HeadRows(spec.dtype, data, kv ? shape.seq_len_kv : shape.seq_len_q,
                      kv ? shape.num_kv_heads : shape.num_heads, dim, id.batch, kv ? hk : id.head,
                      kv ? document.k_begin : document.q_begin,
                      kv ? document.k_length : document.q_length, /*decode_all=*/false,
                      tensor == TensorId::kDout ? 0.0 : float8.Of(tensor, id.batch, hk));
    };
    HeadRows q = one(TensorId::kQ, inputs.q, false, shape.head_dim);
    HeadRows k = one(TensorId::kK, inputs.k, true, shape.head_dim);
    HeadRows v = one(TensorId::kV, inputs.v, true, shape.head_dim_v);
    QueryRow row(spec, document, terms, &float8);
    row.Forward({id.batch, d, id.head, i}, q.Row(i), SinkOf(spec, inputs, id.head), k, v, result,
                at);
    if (!gradients) return;
    HeadRows dout = one(TensorId::kDout, inputs.dout, false, shape.head_dim_v);
    row.Backward<NoKvRow>(q.Row(i), dout.Row(i), DlseOf(spec, inputs, id), k, v, result, at,
                          /*sink_row=*/-1, /*bias_row=*/-1, nullptr);
  });
  return result;
}

Delta DeltaOf(const AttentionSpec& spec, const void* out, const void* dout, const float* dlse) {
  const AttentionShape& shape = spec.shape;
  Delta delta;
  delta.value.assign(shape.batch * shape.num_heads * shape.seq_len_q, 0.0);
  delta.rounding = delta.magnitude = delta.floor = delta.value;
  // A token's heads are adjacent.
  const double cost = static_cast<double>(shape.num_heads * shape.head_dim_v);
  InParallel(shape.batch * shape.seq_len_q, cost, [&](int64_t token) {
    const int64_t b = token / shape.seq_len_q, t = token % shape.seq_len_q;
    for (int64_t h = 0; h < shape.num_heads; ++h) {
      const int64_t element = (token * shape.num_heads + h) * shape.head_dim_v;
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
  });
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
  const PairTerms terms(spec, inputs);
  const double cost = RowCost(shape, shape.seq_len_q * group);
  InParallel(static_cast<int64_t>(rows.size()), cost, [&](int64_t at) {
    const RowId& id = rows[at];
    const int64_t d = DocumentOf(shape.cu_seqlens_k, id.token);
    const Document& document = documents[d];
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
        const PairContext pair = terms.Of({id.batch, d, h, i}, j);
        if (!pair.visible) continue;
        const int64_t statistic =
            (id.batch * shape.num_heads + h) * shape.seq_len_q + document.q_begin + i;
        const double* q = q_rows.Row(i);
        const double* dout = dout_rows.Row(i);
        const Dot dot = DotOf(q, k, shape.head_dim);
        const Score capped = ScoreOf(spec.options, dot.value, pair.before_softcap);
        const double score = capped.value + pair.after_softcap;
        const double row_lse = lse[statistic];
        if (row_lse == -kInfinity) continue;
        const double p = std::exp(score - row_lse);
        Dot dp = DotOf(dout, v, shape.head_dim_v);
        dp = {dp.value * pair.keep, dp.magnitude * pair.keep};
        // Stands for the row's S, which would need all its keys.
        const double added = std::abs(pair.after_softcap);
        const double score_size =
            std::max(std::abs(scale) * dot.magnitude + std::abs(pair.before_softcap) + added,
                     std::abs(row_lse));
        const RowDelta row_delta = {delta.value[statistic], delta.value[statistic],
                                    delta.magnitude[statistic], /*rounding=*/0.0, /*floor=*/0.0};
        const bool wide = score_size >= kWideScores;
        // The share that the row's other keys can take is unknown here: assume all of it.
        const double raw = scale * dot.value + pair.before_softcap;
        const double error =
            2.0 * (ScoreError(spec.options, raw, score_size) + kFloat32Slack * added);
        const double doubt = wide ? Doubt(p, MostProbability(score, row_lse, error), 1.0) : 0.0;
        const double linear_size = wide ? LseLoss(row_lse) : score_size;
        Coefficients ds = GradientTerm(spec, p, dp, row_delta, capped.slope, linear_size, scale);
        ds.floor += std::abs(scale) * doubt * (std::abs(dp.value) + std::abs(row_delta.value));
        Coefficients term = ProbabilityTerm(dtype, p, 1.0, linear_size, pair.keep);
        term.floor += doubt * pair.keep;
        for (int64_t n = 0; n < pair.times; ++n) {
          Accumulate(ds, q, result.dk, at);
          Accumulate(term, dout, result.dv, at);
        }
      }
    }
  });
  FinishAll(spec.result_dtype(), result.dk);
  FinishAll(spec.result_dtype(), result.dv);
  return result;
}

RowSet EvaluateBiasRows(const AttentionSpec& spec, const Inputs& inputs,
                        const std::vector<RowId>& rows) {
  const AttentionShape& shape = spec.shape;
  const BiasForm& bias = *spec.options.bias;
  const std::vector<Document> documents = DocumentsOf(spec);
  const PairTerms terms(spec, inputs);
  Result result;
  result.dbias.Resize(rows, PairColumns(shape));
  for (size_t at = 0; at < rows.size(); ++at) {
    const RowId& id = rows[at];
    const int64_t d = DocumentOf(shape.cu_seqlens_q, id.token);
    const Document& document = documents[d];
    const int64_t i = id.token - document.q_begin;
    for (int64_t b = 0; b < shape.batch; ++b) {
      if (bias.per_batch && b != id.batch) continue;
      for (int64_t h = 0; h < shape.num_heads; ++h) {
        if (bias.per_head && h != id.head) continue;
        const int64_t hk = h / shape.group_size();
        const auto one = [&](const void* data, bool kv, int64_t dim) {
          return HeadRows(spec.dtype, data, kv ? shape.seq_len_kv : shape.seq_len_q,
                          kv ? shape.num_kv_heads : shape.num_heads, dim, b, kv ? hk : h,
                          kv ? document.k_begin : document.q_begin,
                          kv ? document.k_length : document.q_length, /*decode_all=*/false);
        };
        HeadRows q = one(inputs.q, false, shape.head_dim);
        HeadRows k = one(inputs.k, true, shape.head_dim);
        HeadRows v = one(inputs.v, true, shape.head_dim_v);
        HeadRows dout = one(inputs.dout, false, shape.head_dim_v);
        const RowId own{b, id.token, h};
        result.out.Resize({own}, shape.head_dim_v);
        result.lse.Resize({own}, 1);
        result.dq.Resize({own}, shape.head_dim);
        QueryRow row(spec, document, terms);
        row.Forward({b, d, h, i}, q.Row(i), SinkOf(spec, inputs, h), k, v, result, 0);
        row.Backward<NoKvRow>(q.Row(i), dout.Row(i), DlseOf(spec, inputs, own), k, v, result, 0,
                              /*sink_row=*/-1, static_cast<int64_t>(at), nullptr);
      }
    }
  }
  FinishAll(DTypeOf(spec, TensorId::kDbias), result.dbias);
  return std::move(result.dbias);
}

RowSet EvaluateProbabilities(const AttentionSpec& spec, const Inputs& inputs,
                             const std::vector<RowId>& rows) {
  const AttentionShape& shape = spec.shape;
  const std::vector<Document> documents = DocumentsOf(spec);
  const PairTerms terms(spec, inputs);
  RowSet set;
  set.Resize(rows, ProbabilityColumns(spec));
  RowScores scores;
  for (size_t at = 0; at < rows.size(); ++at) {
    const ProbabilityRow& chosen = spec.probability_rows[rows[at].token];
    const int64_t d = shape.packed ? chosen.batch : 0;
    const int64_t b = shape.packed ? 0 : chosen.batch;
    const int64_t h = rows[at].head;
    const Document& document = documents[d];
    HeadRows q(spec.dtype, inputs.q, shape.seq_len_q, shape.num_heads, shape.head_dim, b, h,
               document.q_begin, document.q_length, /*decode_all=*/false);
    HeadRows k(spec.dtype, inputs.k, shape.seq_len_kv, shape.num_kv_heads, shape.head_dim, b,
               h / shape.group_size(), document.k_begin, document.k_length, /*decode_all=*/false);
    const int64_t i = chosen.position;
    ScoreRow(spec, document, terms, {b, d, h, i}, q.Row(i), SinkOf(spec, inputs, h), k, scores);
    if (scores.wide()) DoubtRow(spec.options, scores);
    const double lse = scores.lse();
    for (const VisibleKey& key : scores.keys) {
      const auto element = static_cast<size_t>(static_cast<int64_t>(at) * set.dim + key.position);
      const double p = lse == -kInfinity ? 0.0 : std::exp(key.score - lse);
      set.exact[element] = p;
      set.twin[element] = RoundTo(DType::kFloat32, p);
      // The errors of the score and of the lse.
      set.floor[element] =
          kProbabilityLoss * (1.0 + scores.linear_magnitude()) * p + Float32Flush(p) + key.doubt;
    }
  }
  return set;
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

std::vector<RowId> SampleBiasRows(const AttentionSpec& spec, int64_t count, uint64_t seed) {
  return SampleRows(BiasBatch(spec), spec.shape.seq_len_q, BiasHeads(spec), count, seed);
}

std::vector<RowId> SampleChosenRows(const AttentionSpec& spec, int64_t count, uint64_t seed) {
  const auto rows = static_cast<int64_t>(spec.probability_rows.size());
  return SampleRows(1, rows, spec.shape.num_heads, count, seed);
}

std::vector<RowId> SampleKeyRows(const AttentionSpec& spec, int64_t count, uint64_t seed) {
  return SampleRows(spec.shape.batch, spec.shape.seq_len_kv, spec.shape.num_kv_heads, count, seed);
}

}  // namespace ringattn::oracle
