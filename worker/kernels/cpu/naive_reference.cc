#include "worker/kernels/cpu/naive_reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

struct Token {
  int64_t document = -1;  // -1: in no piece
  int64_t position = 0;
};

std::vector<Token> TokensOf(int64_t rows, const std::vector<Piece>& pieces) {
  std::vector<Token> tokens(rows);
  for (const Piece& piece : pieces) {
    for (int64_t r = 0; r < piece.length; ++r) {
      tokens[piece.local_begin + r] = {piece.document, piece.PositionOf(r)};
    }
  }
  return tokens;
}

// One key that a query row sees.
struct Seen {
  size_t block;
  int64_t row;
  double score;
  double slope;  // d score / d (scale * q.k)
};

double Unit(DType dtype) {
  return dtype == DType::kFloat32 ? 0x1p-20 : dtype == DType::kBFloat16 ? 0x1p-9 : 0x1p-12;
}

}  // namespace

TestShape DenseShape(int64_t sq, int64_t sk, bool causal) {
  TestShape shape;
  AttentionOptions options;
  options.causal = causal;
  shape.bands = {DocumentBand(options, sq, sk)};
  shape.q_rows = sq;
  shape.q_pieces = {{0, sq, 0, 0, 1}};
  shape.kv_rows = {sk};
  shape.kv_pieces = {{{0, sk, 0, 0, 1}}};
  return shape;
}

float TestTensor::At(int64_t i) const {
  float value;
  ConvertToFloat(dtype, bytes.data() + i * ElementBytes(dtype), &value, 1);
  return value;
}
void TestTensor::Set(int64_t i, float value) {
  ConvertFromFloat(dtype, &value, bytes.data() + i * ElementBytes(dtype), 1);
}
TestTensor MakeTensor(DType dtype, int64_t count) {
  TestTensor tensor;
  tensor.dtype = dtype;
  tensor.count = count;
  tensor.bytes.resize(count * ElementBytes(dtype));
  return tensor;
}
void FillRandom(TestTensor& tensor, std::mt19937& random, float magnitude) {
  std::normal_distribution<float> normal(0.0f, magnitude);
  for (int64_t i = 0; i < tensor.count; ++i) tensor.Set(i, normal(random));
}

TestData::TestData(const TestShape& s, uint32_t seed, float magnitude) : shape(s) {
  std::mt19937 random(seed);
  problem = {s.dtype,      s.batch, s.heads,   s.kv_heads, s.head_dim,
             s.head_dim_v, s.scale, s.softcap, s.bands};
  q = MakeTensor(s.dtype, s.batch * s.q_rows * s.heads * s.head_dim);
  dout = MakeTensor(s.dtype, s.batch * s.q_rows * s.heads * s.head_dim_v);
  FillRandom(q, random, magnitude);
  FillRandom(dout, random, 1.0f);
  for (int64_t rows : s.kv_rows) {
    k.push_back(MakeTensor(s.dtype, s.batch * rows * s.kv_heads * s.head_dim));
    v.push_back(MakeTensor(s.dtype, s.batch * rows * s.kv_heads * s.head_dim_v));
    FillRandom(k.back(), random, magnitude);
    FillRandom(v.back(), random, 1.0f);
  }
}

std::vector<KvBlock> TestData::Blocks(std::vector<std::vector<float>>* dk,
                                      std::vector<std::vector<float>>* dv) {
  std::vector<KvBlock> blocks;
  for (size_t i = 0; i < k.size(); ++i) {
    KvBlock block;
    block.rows = shape.kv_rows[i];
    block.pieces = shape.kv_pieces[i];
    block.k = k[i].data();
    block.v = v[i].data();
    if (dk != nullptr) block.dk = (*dk)[i].data();
    if (dv != nullptr) block.dv = (*dv)[i].data();
    blocks.push_back(block);
  }
  return blocks;
}

Reference::Reference(const TestData& data)
    : out(data.dout.count),
      lse(data.shape.batch * data.shape.heads * data.shape.q_rows),
      lse_bound(lse.size()),
      delta(lse.size()),
      dq(data.q.count) {
  const TestShape& s = data.shape;
  const int64_t d = s.head_dim;
  const int64_t dv_dim = s.head_dim_v;
  std::vector<std::vector<Token>> keys;
  for (size_t i = 0; i < data.k.size(); ++i) {
    keys.push_back(TokensOf(s.kv_rows[i], s.kv_pieces[i]));
    dk.emplace_back(data.k[i].count);
    dv.emplace_back(data.v[i].count);
  }
  const std::vector<Token> queries = TokensOf(s.q_rows, s.q_pieces);
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t i = 0; i < s.q_rows; ++i) {
      for (int64_t h = 0; h < s.heads; ++h) {
        const int64_t kv_head = h / (s.heads / s.kv_heads);
        const int64_t q_at = ((b * s.q_rows + i) * s.heads + h) * d;
        const int64_t o_at = ((b * s.q_rows + i) * s.heads + h) * dv_dim;
        const int64_t row_at = (b * s.heads + h) * s.q_rows + i;
        const auto key_row = [&](size_t block, int64_t row) {
          return (b * s.kv_rows[block] + row) * s.kv_heads + kv_head;
        };
        std::vector<Seen> seen;
        double max = -std::numeric_limits<double>::infinity();
        double largest = 1.0;
        for (size_t n = 0; n < keys.size(); ++n) {
          for (int64_t j = 0; j < s.kv_rows[n]; ++j) {
            const Token& query = queries[i];
            const Token& key = keys[n][j];
            if (query.document < 0 || query.document != key.document) continue;
            const Band& band = s.bands[query.document];
            const int64_t distance = key.position - query.position;
            if (distance < band.lower || distance > band.upper) continue;
            double dot = 0.0;
            double magnitude = 0.0;
            for (int64_t e = 0; e < d; ++e) {
              const double term = double{data.q.At(q_at + e)} * data.k[n].At(key_row(n, j) * d + e);
              dot += term;
              magnitude += std::abs(term);
            }
            double score = s.scale * dot;
            double slope = 1.0;
            if (s.softcap > 0) {
              const double t = std::tanh(score / s.softcap);
              score = s.softcap * t;
              slope = 1.0 - t * t;
            }
            largest = std::max(largest, std::abs(s.scale) * magnitude);
            seen.push_back({n, j, score, slope});
            max = std::max(max, score);
            if (std::isnan(score)) max = score;
          }
        }
        double sum = 0.0;
        for (const Seen& key : seen) sum += std::exp(key.score - max);
        lse[row_at] = seen.empty() ? max : max + std::log(sum);
        lse_bound[row_at] = 4e-6 * largest;
        for (const Seen& key : seen) {
          const double p = std::exp(key.score - lse[row_at]);
          for (int64_t e = 0; e < dv_dim; ++e) {
            out.Add(o_at + e, p * data.v[key.block].At(key_row(key.block, key.row) * dv_dim + e));
          }
        }
        double row_delta = 0.0;
        double delta_magnitude = 0.0;
        for (int64_t e = 0; e < dv_dim; ++e) {
          const double grad = data.dout.At(o_at + e);
          row_delta += out.value[o_at + e] * grad;
          delta_magnitude += out.magnitude[o_at + e] * std::abs(grad);
        }
        delta[row_at] = static_cast<float>(row_delta);
        for (const Seen& key : seen) {
          const int64_t row = key_row(key.block, key.row);
          const double p = std::exp(key.score - lse[row_at]);
          double dp = 0.0;
          double dp_magnitude = 0.0;
          for (int64_t e = 0; e < dv_dim; ++e) {
            const double grad = data.dout.At(o_at + e);
            dv[key.block].Add(row * dv_dim + e, p * grad);
            const double term = grad * data.v[key.block].At(row * dv_dim + e);
            dp += term;
            dp_magnitude += std::abs(term);
          }
          const double ds = s.scale * p * (dp - row_delta) * key.slope;
          const double weight = std::abs(s.scale) * p * (dp_magnitude + delta_magnitude);
          for (int64_t e = 0; e < d; ++e) {
            const double q_value = data.q.At(q_at + e);
            const double k_value = data.k[key.block].At(row * d + e);
            dq.value[q_at + e] += ds * k_value;
            dq.magnitude[q_at + e] += weight * std::abs(k_value);
            dk[key.block].value[row * d + e] += ds * q_value;
            dk[key.block].magnitude[row * d + e] += weight * std::abs(q_value);
          }
        }
      }
    }
  }
}

void ExpectClose(const char* what, DType dtype, const std::vector<float>& actual,
                 const Exact& exact, int64_t row) {
  ASSERT_EQ(actual.size(), exact.value.size()) << what;
  for (int64_t begin = 0; begin < static_cast<int64_t>(actual.size()); begin += row) {
    double largest = 0.0;
    for (int64_t i = begin; i < begin + row; ++i) largest = std::max(largest, exact.magnitude[i]);
    for (int64_t i = begin; i < begin + row; ++i) {
      if (!std::isfinite(exact.value[i])) {
        ASSERT_FALSE(std::isfinite(actual[i])) << what << " element " << i;
        continue;
      }
      // The last term: fp32 ends where fp64 still has digits.
      const double bound = 8.0 * Unit(dtype) * exact.magnitude[i] + 1e-6 * largest + 1e-36;
      ASSERT_TRUE(std::abs(actual[i] - exact.value[i]) <= bound)
          << what << " element " << i << " of row length " << row << ": " << actual[i] << ", exact "
          << exact.value[i] << " +- " << bound;
    }
  }
}

void ExpectLseClose(const std::vector<float>& actual, const Reference& reference) {
  ASSERT_EQ(actual.size(), reference.lse.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    const double exact = reference.lse[i];
    if (std::isinf(exact)) {
      ASSERT_EQ(actual[i], exact) << "lse of row " << i;
    } else if (std::isnan(exact)) {
      ASSERT_TRUE(std::isnan(actual[i])) << "lse of row " << i;
    } else {
      ASSERT_TRUE(std::abs(actual[i] - exact) <= reference.lse_bound[i])
          << "lse of row " << i << ": " << actual[i] << ", exact " << exact;
    }
  }
}

}  // namespace ringattn::worker
