// Checks the oracle by independent means: pictures of the mask, a second formula in matrix form,
// finite differences, and identities.
#include "common/oracle/oracle.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "common/oracle/generator.h"
#include "common/oracle/numeric.h"
#include "gtest/gtest.h"

namespace ringattn::oracle {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::string Picture(const MaskRule& options, int64_t sq, int64_t sk) {
  std::string picture;
  for (int64_t i = 0; i < sq; ++i) {
    for (int64_t j = 0; j < sk; ++j) picture += Sees(options, sq, sk, i, j) ? 'x' : '.';
    picture += '\n';
  }
  return picture;
}

TEST(Sees, CausalIsAlignedToTheBottomRight) {
  const MaskRule causal = {.causal = true};
  EXPECT_EQ(Picture(causal, 3, 3), "x..\nxx.\nxxx\n");
  EXPECT_EQ(Picture(causal, 2, 4), "xxx.\nxxxx\n");
  EXPECT_EQ(Picture(causal, 4, 2), "..\n..\nx.\nxx\n");
}

TEST(Sees, Windows) {
  EXPECT_EQ(Picture({.window_left = 1, .window_right = 0}, 3, 3), "x..\nxx.\n.xx\n");
  EXPECT_EQ(Picture({.window_left = 0, .window_right = 1}, 3, 3), "xx.\n.xx\n..x\n");
  EXPECT_EQ(Picture({.window_left = 1, .window_right = -1}, 3, 3), "xxx\nxxx\n.xx\n");
  EXPECT_EQ(Picture({.window_left = -1, .window_right = 1}, 3, 3), "xx.\nxxx\nxxx\n");
  EXPECT_EQ(Picture({.causal = true, .window_left = 1, .window_right = 1}, 2, 4), ".xx.\n..xx\n");
  EXPECT_EQ(Picture({.window_left = 1, .window_right = 1}, 4, 2), "..\nx.\nxx\nxx\n");
}

AttentionSpec DenseSpec(int64_t batch, int64_t sq, int64_t sk, int64_t heads, int64_t kv_heads,
                        int64_t dim, int64_t dim_v) {
  AttentionSpec spec;
  spec.shape = {.batch = batch,
                .seq_len_q = sq,
                .seq_len_kv = sk,
                .num_heads = heads,
                .num_kv_heads = kv_heads,
                .head_dim = dim,
                .head_dim_v = dim_v,
                .cu_seqlens_q = {0, sq},
                .cu_seqlens_k = {0, sk}};
  spec.options.softmax_scale = 1.0 / std::sqrt(static_cast<double>(dim));
  return spec;
}

AttentionSpec PackedSpec(std::vector<int64_t> cu_q, std::vector<int64_t> cu_k) {
  AttentionSpec spec = DenseSpec(1, cu_q.back(), cu_k.back(), 4, 2, 8, 6);
  spec.shape.packed = true;
  spec.shape.cu_seqlens_q = std::move(cu_q);
  spec.shape.cu_seqlens_k = std::move(cu_k);
  return spec;
}

// A few specs that together cover the options.
std::vector<AttentionSpec> Specs() {
  std::vector<AttentionSpec> specs;
  specs.push_back(DenseSpec(1, 9, 9, 1, 1, 4, 4));
  specs.push_back(DenseSpec(2, 7, 11, 4, 2, 8, 5));
  specs.back().options.causal = true;
  specs.push_back(DenseSpec(1, 12, 6, 6, 1, 3, 7));
  specs.back().options.causal = true;
  specs.back().options.softcap = 2.0;
  specs.push_back(DenseSpec(1, 10, 13, 2, 2, 5, 5));
  specs.back().options.window_left = 3;
  specs.back().options.window_right = 2;
  specs.back().options.softmax_scale = -0.7;
  specs.push_back(PackedSpec({0, 4, 4, 9, 15}, {0, 6, 8, 8, 13}));
  specs.back().options.softcap = 5.0;
  specs.back().options.window_left = 4;
  specs.push_back(DenseSpec(2, 7, 4, 5, 1, 4, 3));  // causal: some rows see no key
  specs.back().options.causal = true;
  specs.back().options.sinks = true;
  specs.back().has_dlse = true;
  specs.push_back(PackedSpec({0, 4, 4, 9}, {0, 6, 8, 11}));
  specs.back().options.sinks = true;
  specs.back().options.softcap = 3.0;
  specs.back().shape.document_rules = {{true, -1, -1}, {}, {false, 1, 0}};
  specs.push_back(DenseSpec(1, 6, 8, 2, 2, 4, 4));
  specs.back().has_dlse = true;
  return specs;
}

// --- A second formula -------------------------------------------------------

using Matrix = std::vector<std::vector<long double>>;

Matrix Zeros(int64_t rows, int64_t columns) {
  return Matrix(rows, std::vector<long double>(columns, 0.0L));
}

Matrix Product(const Matrix& a, const Matrix& b, int64_t columns) {
  Matrix c = Zeros(a.size(), columns);
  for (size_t i = 0; i < a.size(); ++i) {
    for (size_t k = 0; k < b.size(); ++k) {
      for (int64_t j = 0; j < columns; ++j) c[i][j] += a[i][k] * b[k][j];
    }
  }
  return c;
}

Matrix Transposed(const Matrix& a, int64_t columns) {
  Matrix t = Zeros(columns, a.size());
  for (size_t i = 0; i < a.size(); ++i) {
    for (int64_t j = 0; j < columns; ++j) t[j][i] = a[i][j];
  }
  return t;
}

// Returns the rows of one head as a matrix over the whole token axis.
Matrix HeadOf(const AttentionSpec& spec, const void* data, int64_t b, int64_t tokens, int64_t heads,
              int64_t head, int64_t dim) {
  Matrix m = Zeros(tokens, dim);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t d = 0; d < dim; ++d) {
      m[t][d] = Load(spec.dtype, data, ((b * tokens + t) * heads + head) * dim + d);
    }
  }
  return m;
}

// Additive mask over all tokens of the packed axis: 0 or -inf, from document labels and offsets
// rather than from Sees.
Matrix Bias(const AttentionSpec& spec) {
  const AttentionShape& shape = spec.shape;
  Matrix bias = Zeros(shape.seq_len_q, shape.seq_len_kv);
  for (auto& row : bias) std::fill(row.begin(), row.end(), -kInfinity);
  for (size_t d = 0; d + 1 < shape.cu_seqlens_q.size(); ++d) {
    const int64_t q_end = shape.cu_seqlens_q[d + 1], k_end = shape.cu_seqlens_k[d + 1];
    for (int64_t tq = shape.cu_seqlens_q[d]; tq < q_end; ++tq) {
      for (int64_t tk = shape.cu_seqlens_k[d]; tk < k_end; ++tk) {
        // Distances from the ends of the document: by how much the key is ahead.
        const int64_t ahead = (q_end - 1 - tq) - (k_end - 1 - tk);
        const MaskRule o =
            shape.document_rules.empty()
                ? MaskRule{spec.options.causal, spec.options.window_left, spec.options.window_right}
                : shape.document_rules[d];
        const int64_t furthest = o.causal ? 0 : int64_t{1} << 40;
        const int64_t right = o.window_right < 0 ? furthest : std::min(o.window_right, furthest);
        const int64_t left = o.window_left < 0 ? int64_t{1} << 40 : o.window_left;
        if (ahead <= right && ahead >= -left) bias[tq][tk] = 0.0L;
      }
    }
  }
  return bias;
}

void ExpectRows(const RowSet& set, int64_t b, int64_t tokens, int64_t heads, int64_t head,
                const Matrix& expected, const char* name) {
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t d = 0; d < set.dim; ++d) {
      const double value = set.exact[((b * tokens + t) * heads + head) * set.dim + d];
      const double other = static_cast<double>(expected[t][d]);
      ASSERT_NEAR(value, other, 1e-12 * (1.0 + std::abs(other)))
          << name << " b " << b << " t " << t << " h " << head << " d " << d;
    }
  }
}

TEST(Oracle, AgreesWithMatrices) {
  for (const AttentionSpec& spec : Specs()) {
    const AttentionShape& shape = spec.shape;
    const int64_t sq = shape.seq_len_q, sk = shape.seq_len_kv, dim = shape.head_dim,
                  dim_v = shape.head_dim_v;
    const InputTensors inputs = GenerateInputs(spec, DataKind::kNormal, 11, true);
    const Result result = EvaluateAll(spec, inputs.view());
    const Matrix bias = Bias(spec);
    Matrix dsinks = Zeros(shape.num_heads, 1);
    for (int64_t b = 0; b < shape.batch; ++b) {
      for (int64_t hk = 0; hk < shape.num_kv_heads; ++hk) {
        const Matrix k = HeadOf(spec, inputs.k.data(), b, sk, shape.num_kv_heads, hk, dim);
        const Matrix v = HeadOf(spec, inputs.v.data(), b, sk, shape.num_kv_heads, hk, dim_v);
        Matrix dk = Zeros(sk, dim), dv = Zeros(sk, dim_v);
        for (int64_t g = 0; g < shape.group_size(); ++g) {
          const int64_t h = hk * shape.group_size() + g;
          const Matrix q = HeadOf(spec, inputs.q.data(), b, sq, shape.num_heads, h, dim);
          const Matrix dout = HeadOf(spec, inputs.dout.data(), b, sq, shape.num_heads, h, dim_v);
          // P row by row without a maximum, and the softmax's Jacobian in full: ds_j = sum over l
          // of (p_j [j = l] - p_j p_l) dp_l.
          Matrix p = Product(q, Transposed(k, dim), sk);
          Matrix slope = Zeros(sq, sk), lse = Zeros(sq, 1);
          std::vector<long double> sink_p(sq);
          for (int64_t i = 0; i < sq; ++i) {
            long double sum = 0.0L;
            for (int64_t j = 0; j < sk; ++j) {
              long double s = spec.options.softmax_scale * p[i][j];
              slope[i][j] = 1.0L;
              if (spec.options.softcap > 0.0) {
                const long double t = std::tanh(s / spec.options.softcap);
                s = spec.options.softcap * t;
                slope[i][j] = 1.0L - t * t;
              }
              p[i][j] = std::exp(s + bias[i][j]);
              sum += p[i][j];
            }
            const long double sink =
                spec.options.sinks ? std::exp(static_cast<long double>(inputs.sinks[h])) : 0.0L;
            sum += sink;
            sink_p[i] = sum > 0.0L ? sink / sum : 0.0L;
            lse[i][0] = std::log(sum);
            for (auto& value : p[i]) value = sum > 0.0L ? value / sum : 0.0L;
            const double oracle_lse = result.lse.exact[(b * sq + i) * shape.num_heads + h];
            if (sum == 0.0L) {
              ASSERT_EQ(oracle_lse, -kInfinity);
            } else {
              ASSERT_NEAR(oracle_lse, static_cast<double>(lse[i][0]), 1e-12);
            }
          }
          ExpectRows(result.out, b, sq, shape.num_heads, h, Product(p, v, dim_v), "out");
          const Matrix dp = Product(dout, Transposed(v, dim_v), sk);
          Matrix ds = Zeros(sq, sk);
          for (int64_t i = 0; i < sq; ++i) {
            const long double dlse =
                spec.has_dlse ? inputs.dlse[(b * shape.num_heads + h) * sq + i] : 0.0L;
            dsinks[h][0] += sink_p[i] * dlse;
            for (int64_t l = 0; l < sk; ++l) dsinks[h][0] -= sink_p[i] * p[i][l] * dp[i][l];
            for (int64_t j = 0; j < sk; ++j) {
              for (int64_t l = 0; l < sk; ++l) {
                ds[i][j] += ((j == l ? p[i][j] : 0.0L) - p[i][j] * p[i][l]) * dp[i][l];
              }
              ds[i][j] += p[i][j] * dlse;
              ds[i][j] *= slope[i][j] * spec.options.softmax_scale;
            }
          }
          ExpectRows(result.dq, b, sq, shape.num_heads, h, Product(ds, k, dim), "dq");
          const Matrix dk_part = Product(Transposed(ds, sk), q, dim);
          const Matrix dv_part = Product(Transposed(p, sk), dout, dim_v);
          for (int64_t j = 0; j < sk; ++j) {
            for (int64_t d = 0; d < dim; ++d) dk[j][d] += dk_part[j][d];
            for (int64_t d = 0; d < dim_v; ++d) dv[j][d] += dv_part[j][d];
          }
        }
        ExpectRows(result.dk, b, sk, shape.num_kv_heads, hk, dk, "dk");
        ExpectRows(result.dv, b, sk, shape.num_kv_heads, hk, dv, "dv");
      }
    }
    EXPECT_EQ(result.dsinks.rows.size(), spec.options.sinks ? shape.num_heads : 0u);
    for (size_t h = 0; h < result.dsinks.rows.size(); ++h) {
      EXPECT_NEAR(result.dsinks.exact[h], static_cast<double>(dsinks[h][0]), 1e-12);
    }
  }
}

// --- Finite differences -----------------------------------------------------

double Loss(const AttentionSpec& spec, const InputTensors& inputs) {
  Inputs forward = inputs.view();
  forward.dout = nullptr;
  const Result result = EvaluateAll(spec, forward);
  double loss = 0.0;
  for (size_t e = 0; e < result.out.exact.size(); ++e) {
    loss += result.out.exact[e] * Load(spec.dtype, inputs.dout.data(), e);
  }
  for (size_t r = 0; r < result.lse.rows.size() && spec.has_dlse; ++r) {
    const RowId& row = result.lse.rows[r];
    if (result.lse.exact[r] == -kInfinity) continue;
    loss +=
        result.lse.exact[r] *
        inputs
            .dlse[(row.batch * spec.shape.num_heads + row.head) * spec.shape.seq_len_q + row.token];
  }
  return loss;
}

void ExpectDerivative(const AttentionSpec& spec, InputTensors& inputs, void* tensor,
                      const RowSet& gradient, const char* name) {
  for (size_t e = 0; e < gradient.exact.size(); ++e) {
    float* element = static_cast<float*>(tensor) + e;
    const float kept = *element;
    if (kept == -kInfinity) continue;  // -inf is no sink
    // fp32 inputs hold these steps approximately: use the stored values.
    *element = kept + 0x1p-9f;
    const double high = *element, loss_high = Loss(spec, inputs);
    *element = kept - 0x1p-9f;
    const double low = *element, loss_low = Loss(spec, inputs);
    *element = kept;
    ASSERT_NEAR(gradient.exact[e], (loss_high - loss_low) / (high - low), 3e-5)
        << name << " element " << e;
  }
}

TEST(Oracle, GradientsAreDerivatives) {
  for (const AttentionSpec& spec : Specs()) {
    InputTensors inputs = GenerateInputs(spec, DataKind::kNormal, 3, true);
    const Result result = EvaluateAll(spec, inputs.view());
    ExpectDerivative(spec, inputs, inputs.q.data(), result.dq, "dq");
    ExpectDerivative(spec, inputs, inputs.k.data(), result.dk, "dk");
    ExpectDerivative(spec, inputs, inputs.v.data(), result.dv, "dv");
    ExpectDerivative(spec, inputs, inputs.sinks.data(), result.dsinks, "dsinks");
  }
}

// --- Identities and edges ---------------------------------------------------

TEST(Oracle, RowsThatSeeNothing) {
  AttentionSpec spec = DenseSpec(1, 5, 2, 1, 1, 4, 4);
  spec.options.causal = true;
  const InputTensors inputs = GenerateInputs(spec, DataKind::kNormal, 1, true);
  const Result result = EvaluateAll(spec, inputs.view());
  for (int64_t i = 0; i < 3; ++i) {
    EXPECT_EQ(result.lse.exact[i], -kInfinity);
    for (int64_t d = 0; d < 4; ++d) {
      EXPECT_EQ(result.out.exact[i * 4 + d], 0.0);
      EXPECT_EQ(result.dq.exact[i * 4 + d], 0.0);
      EXPECT_EQ(result.dq.floor[i * 4 + d], 0.0);
      EXPECT_EQ(result.dq.magnitude[i * 4 + d], 0.0);
    }
  }
  EXPECT_TRUE(std::isfinite(result.lse.exact[3]));
}

// A row's sink takes probability from its keys; in a row without keys it takes all of it.
TEST(Oracle, ASinkOfMinusInfinityIsNone) {
  AttentionSpec spec = DenseSpec(1, 5, 2, 1, 1, 4, 4);
  spec.options.causal = true;
  InputTensors inputs = GenerateInputs(spec, DataKind::kNormal, 1, true);
  const Result without = EvaluateAll(spec, inputs.view());
  spec.options.sinks = true;
  inputs.sinks = {static_cast<float>(-kInfinity)};
  const Result none = EvaluateAll(spec, inputs.view());
  EXPECT_EQ(none.out.exact, without.out.exact);
  EXPECT_EQ(none.out.twin, without.out.twin);
  EXPECT_EQ(none.lse.exact, without.lse.exact);
  EXPECT_EQ(none.dq.exact, without.dq.exact);
  EXPECT_EQ(none.dsinks.exact, std::vector<double>{0.0});
  inputs.sinks = {0.5f};
  const Result some = EvaluateAll(spec, inputs.view());
  EXPECT_EQ(some.lse.exact[0], 0.5);  // sees no key
  EXPECT_EQ(some.out.exact[0], 0.0);
  const double share = 1.0 / (1.0 + std::exp(0.5 - without.lse.exact[4]));
  for (int64_t d = 0; d < 4; ++d) {
    EXPECT_NEAR(some.out.exact[4 * 4 + d], share * without.out.exact[4 * 4 + d], 1e-15);
  }
}

TEST(Oracle, EmptyTensors) {
  for (const auto& [sq, sk] : {std::pair{0, 3}, {3, 0}, {0, 0}}) {
    const AttentionSpec spec = DenseSpec(2, sq, sk, 2, 1, 4, 4);
    const InputTensors inputs = GenerateInputs(spec, DataKind::kNormal, 1, true);
    const Result result = EvaluateAll(spec, inputs.view());
    EXPECT_EQ(result.out.rows.size(), 2u * sq * 2);
    EXPECT_EQ(result.dk.rows.size(), 2u * sk);
    for (const double value : result.dv.exact) EXPECT_EQ(value, 0.0);
    for (const double value : result.lse.exact) EXPECT_EQ(value, -kInfinity);
  }
}

TEST(Oracle, OneKeyCopiesItsValue) {
  const AttentionSpec spec = DenseSpec(1, 3, 1, 1, 1, 4, 4);
  const InputTensors inputs = GenerateInputs(spec, DataKind::kNormal, 1, true);
  const Result result = EvaluateAll(spec, inputs.view());
  for (int64_t i = 0; i < 3; ++i) {
    for (int64_t d = 0; d < 4; ++d) {
      EXPECT_EQ(result.out.exact[i * 4 + d], Load(spec.dtype, inputs.v.data(), d));
      EXPECT_EQ(result.dq.exact[i * 4 + d], 0.0);
      EXPECT_GT(result.dq.floor[i * 4 + d], 0.0);
    }
  }
}

// Scores of a wide row (S of at least 2^17) may cancel to an lse below 2^17. The backward then
// works as in ordinary rows and loses half a unit in lse's last place of p: 2^-8 at 2^16. If lse is
// wide too, the only key's p is 1.
TEST(Oracle, AWideRowsGradientIsGrantedTheRoundingOfItsLse) {
  AttentionSpec spec = DenseSpec(1, 1, 1, 1, 1, 2, 1);
  spec.options.softmax_scale = 1.0;
  const float dout = 1.0f, v = 1.0f;
  for (const float lse : {100000.0f, 1000000.0f}) {
    const float q[] = {1.0f, 1.0f}, k[] = {2e6f, lse - 2e6f};
    const Result result = EvaluateAll(spec, {.q = q, .k = k, .v = &v, .dout = &dout});
    EXPECT_EQ(result.lse.exact[0], lse);
    EXPECT_EQ(result.dv.exact[0], 1.0);
    if (lse < 0x1p17f) {
      EXPECT_GE(result.dv.floor[0], 0x1p-8);
      EXPECT_LE(result.dv.floor[0], 0x1p-4);
    } else {
      EXPECT_LE(result.dv.floor[0], 0x1p-20);
    }
  }
}

TEST(Oracle, TheTwinsErrorIsOfTheDtypesSize) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    AttentionSpec spec = DenseSpec(1, 64, 64, 2, 2, 32, 32);
    spec.dtype = dtype;
    const InputTensors inputs = GenerateInputs(spec, DataKind::kNormal, 1, true);
    const Result result = EvaluateAll(spec, inputs.view());
    for (const RowSet* set : {&result.out, &result.dq, &result.dk, &result.dv}) {
      double error = 0.0, exact = 0.0;
      for (size_t e = 0; e < set->exact.size(); ++e) {
        error += std::pow(set->twin[e] - set->exact[e], 2);
        exact += std::pow(set->exact[e], 2);
        ASSERT_LE(std::abs(set->exact[e]), set->magnitude[e] * (1.0 + 1e-12));
      }
      const double relative = std::sqrt(error / exact);
      // The format's rounding unit: 2^-24, 2^-8, 2^-11.
      const double unit = dtype == DType::kFloat32    ? 0x1p-24
                          : dtype == DType::kBFloat16 ? 0x1p-8
                                                      : 0x1p-11;
      EXPECT_GT(relative, 0.2 * unit);
      EXPECT_LT(relative, 4.0 * unit);
    }
  }
}

// Without the results' rounding only the rounding of p and ds remains: smaller, and not
// representable in the request's dtype.
TEST(Oracle, Float32ResultsAreNotRounded) {
  AttentionSpec spec = DenseSpec(1, 64, 64, 2, 2, 32, 32);
  spec.dtype = DType::kBFloat16;
  const InputTensors inputs = GenerateInputs(spec, DataKind::kNormal, 1, true);
  const Result rounded = EvaluateAll(spec, inputs.view());
  spec.fp32_results = true;
  const Result whole = EvaluateAll(spec, inputs.view());
  const auto error = [](const RowSet& set) {
    double sum = 0.0;
    for (size_t e = 0; e < set.exact.size(); ++e) sum += std::pow(set.twin[e] - set.exact[e], 2);
    return std::sqrt(sum);
  };
  for (const auto tensor : {&Result::out, &Result::dq, &Result::dk, &Result::dv}) {
    EXPECT_EQ((whole.*tensor).exact, (rounded.*tensor).exact);
    EXPECT_LT(error(whole.*tensor), 0.9 * error(rounded.*tensor));
    bool representable = true;
    for (const double value : (whole.*tensor).twin) {
      representable = representable && RoundTo(DType::kBFloat16, value) == value;
    }
    EXPECT_FALSE(representable);
  }
}

TEST(Oracle, SampledRowsEqualTheWhole) {
  for (AttentionSpec spec : Specs()) {
    spec.dtype = DType::kBFloat16;
    const AttentionShape& shape = spec.shape;
    const InputTensors inputs = GenerateInputs(spec, DataKind::kNormal, 21, true);
    const Result whole = EvaluateAll(spec, inputs.view());
    const auto q_rows = SampleQueryRows(spec, 10, 1);
    ASSERT_EQ(q_rows.size(), std::min<size_t>(10, whole.out.rows.size()));
    const Result sampled = EvaluateQueryRows(spec, inputs.view(), q_rows);
    for (size_t r = 0; r < q_rows.size(); ++r) {
      const RowId& id = q_rows[r];
      const int64_t at = (id.batch * shape.seq_len_q + id.token) * shape.num_heads + id.head;
      EXPECT_EQ(sampled.lse.exact[r], whole.lse.exact[at]);
      for (int64_t d = 0; d < shape.head_dim_v; ++d) {
        EXPECT_EQ(sampled.out.exact[r * shape.head_dim_v + d],
                  whole.out.exact[at * shape.head_dim_v + d]);
      }
      for (int64_t d = 0; d < shape.head_dim; ++d) {
        EXPECT_EQ(sampled.dq.twin[r * shape.head_dim + d], whole.dq.twin[at * shape.head_dim + d]);
      }
    }
    // Key rows use the exact lse (in fp32) and delta.
    std::vector<float> lse(shape.batch * shape.num_heads * shape.seq_len_q);
    Delta delta;
    delta.value.resize(lse.size());
    delta.magnitude.resize(lse.size());
    delta.rounding.resize(lse.size());
    delta.floor.resize(lse.size());
    for (size_t at = 0; at < whole.out.rows.size(); ++at) {
      const RowId& id = whole.out.rows[at];
      const int64_t index = (id.batch * shape.num_heads + id.head) * shape.seq_len_q + id.token;
      lse[index] = static_cast<float>(whole.lse.exact[at]);
      for (int64_t d = 0; d < shape.head_dim_v; ++d) {
        delta.value[index] += whole.out.exact[at * shape.head_dim_v + d] *
                              Load(spec.dtype, inputs.dout.data(), at * shape.head_dim_v + d);
      }
      if (spec.has_dlse) delta.value[index] -= inputs.dlse[index];
    }
    if (spec.options.sinks) {
      const RowSet sinks = EvaluateSinkGradients(spec, inputs.sinks.data(), lse.data(), delta);
      ASSERT_EQ(sinks.rows, whole.dsinks.rows);
      for (size_t h = 0; h < sinks.rows.size(); ++h) {
        EXPECT_NEAR(sinks.exact[h], whole.dsinks.exact[h], 1e-5);
      }
    }
    const auto k_rows = SampleKeyRows(spec, 10, 2);
    const Result keys = EvaluateKeyRows(spec, inputs.view(), k_rows, lse.data(), delta);
    for (size_t r = 0; r < k_rows.size(); ++r) {
      const RowId& id = k_rows[r];
      const int64_t at = (id.batch * shape.seq_len_kv + id.token) * shape.num_kv_heads + id.head;
      for (int64_t d = 0; d < shape.head_dim; ++d) {
        EXPECT_NEAR(keys.dk.exact[r * shape.head_dim + d], whole.dk.exact[at * shape.head_dim + d],
                    3e-6);
      }
      for (int64_t d = 0; d < shape.head_dim_v; ++d) {
        EXPECT_NEAR(keys.dv.exact[r * shape.head_dim_v + d],
                    whole.dv.exact[at * shape.head_dim_v + d], 3e-6);
      }
    }
  }
}

TEST(Oracle, DeltaOfIsTheRowSum) {
  const AttentionSpec spec = DenseSpec(2, 3, 3, 2, 1, 4, 3);
  const InputTensors inputs = GenerateInputs(spec, DataKind::kNormal, 8, true);
  // Any tensor of out's shape can stand for out.
  const Delta delta = DeltaOf(spec, inputs.dout.data(), inputs.dout.data(), nullptr);
  const float* dout = reinterpret_cast<const float*>(inputs.dout.data());
  // Row (b 1, t 2, h 0) is at ((1 * 3 + 2) * 2 + 0) * 3, its delta at (1 * 2 + 0) * 3 + 2.
  double sum = 0.0;
  for (int d = 0; d < 3; ++d) sum += static_cast<double>(dout[30 + d]) * dout[30 + d];
  EXPECT_DOUBLE_EQ(delta.value[8], sum);
  EXPECT_DOUBLE_EQ(delta.magnitude[8], sum);
}

TEST(Oracle, SamplesAreDistinctAndKeepTheEnds) {
  const AttentionSpec spec = DenseSpec(2, 50, 40, 4, 2, 4, 4);
  const auto rows = SampleQueryRows(spec, 60, 9);
  ASSERT_EQ(rows.size(), 60u);
  EXPECT_EQ(rows.front(), (RowId{0, 0, 0}));
  EXPECT_EQ(rows.back(), (RowId{1, 49, 3}));
  for (size_t r = 1; r < rows.size(); ++r) EXPECT_FALSE(rows[r] == rows[r - 1]);
  EXPECT_EQ(SampleKeyRows(spec, 1000, 9).size(), 2u * 40 * 2);
}

}  // namespace
}  // namespace ringattn::oracle
