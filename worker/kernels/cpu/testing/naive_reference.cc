#include "worker/kernels/cpu/testing/naive_reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

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
                                      std::vector<std::vector<float>>* dv) const {
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
  for (size_t i = 0; i < data.k.size(); ++i) {
    dk.emplace_back(data.k[i].count);
    dv.emplace_back(data.v[i].count);
  }
  const std::vector<KvBlock> blocks = data.Blocks();
  const SeenKeys keys(data.problem, s.q_rows, s.q_pieces, data.q.data(), blocks);
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t i = 0; i < s.q_rows; ++i) {
      for (int64_t h = 0; h < s.heads; ++h) {
        const QueryHead query{b, i, h};
        const std::vector<SeenKey> seen = keys.Of(query);
        AddForward(data, query, seen);
        AddBackward(data, query, seen);
      }
    }
  }
}

void Reference::AddForward(const TestData& data, const QueryHead& query,
                           const std::vector<SeenKey>& seen) {
  const TestShape& s = data.shape;
  const int64_t row_at = (query.batch * s.heads + query.head) * s.q_rows + query.row;
  const int64_t o_at =
      RowOffset(query.batch, s.q_rows, query.row, s.heads, query.head, s.head_dim_v);
  double max = -std::numeric_limits<double>::infinity();
  double largest = 1.0;
  for (const SeenKey& key : seen) {
    largest = std::max(largest, key.magnitude);
    max = std::isnan(key.score) ? key.score : std::max(max, key.score);
  }
  double sum = 0.0;
  for (const SeenKey& key : seen) sum += std::exp(key.score - max);
  lse[row_at] = seen.empty() ? max : max + std::log(sum);
  lse_bound[row_at] = 4e-6 * largest;
  for (const SeenKey& key : seen) {
    const double p = std::exp(key.score - lse[row_at]);
    const int64_t v_at = RowOffset(query.batch, s.kv_rows[key.block], key.row, s.kv_heads,
                                   KvHeadOf(data.problem, query.head), s.head_dim_v);
    for (int64_t e = 0; e < s.head_dim_v; ++e)
      out.Add(o_at + e, p * data.v[key.block].At(v_at + e));
  }
}

void Reference::AddBackward(const TestData& data, const QueryHead& query,
                            const std::vector<SeenKey>& seen) {
  const TestShape& s = data.shape;
  const int64_t row_at = (query.batch * s.heads + query.head) * s.q_rows + query.row;
  const int64_t q_at = RowOffset(query.batch, s.q_rows, query.row, s.heads, query.head, s.head_dim);
  const int64_t o_at =
      RowOffset(query.batch, s.q_rows, query.row, s.heads, query.head, s.head_dim_v);
  double row_delta = 0.0;
  double delta_magnitude = 0.0;
  for (int64_t e = 0; e < s.head_dim_v; ++e) {
    const double grad = data.dout.At(o_at + e);
    row_delta += out.value[o_at + e] * grad;
    delta_magnitude += out.magnitude[o_at + e] * std::abs(grad);
  }
  delta[row_at] = static_cast<float>(row_delta);
  for (const SeenKey& key : seen) {
    const int64_t kv_head = KvHeadOf(data.problem, query.head);
    const int64_t rows = s.kv_rows[key.block];
    const int64_t k_at = RowOffset(query.batch, rows, key.row, s.kv_heads, kv_head, s.head_dim);
    const int64_t v_at = RowOffset(query.batch, rows, key.row, s.kv_heads, kv_head, s.head_dim_v);
    const double p = std::exp(key.score - lse[row_at]);
    double dp = 0.0;
    double dp_magnitude = 0.0;
    for (int64_t e = 0; e < s.head_dim_v; ++e) {
      const double grad = data.dout.At(o_at + e);
      dv[key.block].Add(v_at + e, p * grad);
      const double term = grad * data.v[key.block].At(v_at + e);
      dp += term;
      dp_magnitude += std::abs(term);
    }
    const double ds = s.scale * p * (dp - row_delta) * key.slope;
    const double weight = std::abs(s.scale) * p * (dp_magnitude + delta_magnitude);
    for (int64_t e = 0; e < s.head_dim; ++e) {
      const double q_value = data.q.At(q_at + e);
      const double k_value = data.k[key.block].At(k_at + e);
      dq.value[q_at + e] += ds * k_value;
      dq.magnitude[q_at + e] += weight * std::abs(k_value);
      dk[key.block].value[k_at + e] += ds * q_value;
      dk[key.block].magnitude[k_at + e] += weight * std::abs(q_value);
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
