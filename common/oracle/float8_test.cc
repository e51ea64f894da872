// Tests which results of a forward in e4m3 the oracle accepts. Plain code that shares nothing with
// the kernels computes the results.
#include "common/oracle/float8.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "common/oracle/generator.h"
#include "common/oracle/numeric.h"
#include "common/oracle/verify.h"
#include "gtest/gtest.h"

namespace ringattn::oracle {
namespace {

// How a result is computed.
struct Made {
  bool rounds_qk = true;
  bool rounds_v = true;
  bool rounds_p = true;
  double v_scale = 1.0;      // factor of v's dequantisation; 1 is right
  double score_scale = 1.0;  // the same for scores
  int64_t block = 1 << 20;   // keys that share scales and a running maximum
};

class Float8Test : public testing::Test {
 protected:
  static constexpr int64_t kTokens = 160;
  static constexpr int64_t kHeads = 2;
  static constexpr int64_t kDim = 64;

  Float8Test() {
    spec_.dtype = DType::kBFloat16;
    spec_.shape = {.batch = 1,
                   .seq_len_q = kTokens,
                   .seq_len_kv = kTokens,
                   .num_heads = kHeads,
                   .num_kv_heads = kHeads,
                   .head_dim = kDim,
                   .head_dim_v = kDim,
                   .cu_seqlens_q = {0, kTokens},
                   .cu_seqlens_k = {0, kTokens}};
    spec_.options = {.softmax_scale = 0.125, .compute_dtype = ComputeDType::kFloat8E4M3};
    inputs_ = GenerateInputs(spec_, DataKind::kNormal, 3, false);
    out_.resize(kTokens * kHeads * kDim * 2);
    lse_.resize(kTokens * kHeads);
  }

  // Returns rows [first, last) of head h, dequantised.
  std::vector<double> Rows(const void* data, int64_t h, int64_t first, int64_t last, bool rounds) {
    std::vector<double> rows;
    double largest = 0;
    for (int64_t t = first; t < last; ++t) {
      for (int64_t d = 0; d < kDim; ++d) {
        rows.push_back(Load(DType::kBFloat16, data, (t * kHeads + h) * kDim + d));
        largest = std::max(largest, std::abs(rows.back()));
      }
    }
    const double scale = std::exp2(std::ceil(std::log2(largest / 448.0)));
    for (double& x : rows) x = rounds ? RoundToE4m3(x / scale) * scale : x;
    return rows;
  }

  Report Judge(const Made& made, const VerifyOptions& options = {}) {
    const Inputs in = inputs_.view();
    for (int64_t h = 0; h < kHeads; ++h) {
      const std::vector<double> q = Rows(in.q, h, 0, kTokens, made.rounds_qk);
      std::vector<std::vector<double>> k, v;
      for (int64_t at = 0; at < kTokens; at += made.block) {
        const int64_t end = std::min(kTokens, at + made.block);
        k.push_back(Rows(in.k, h, at, end, made.rounds_qk));
        v.push_back(Rows(in.v, h, at, end, made.rounds_v));
      }
      for (int64_t i = 0; i < kTokens; ++i) Row(made, h, i, &q[i * kDim], k, v);
    }
    return Verify(spec_, in, {.out = out_.data(), .lse = lse_.data()}, {}, options);
  }

  AttentionSpec spec_;
  InputTensors inputs_;
  std::vector<uint8_t> out_;
  std::vector<float> lse_;

 private:
  void Row(const Made& made, int64_t h, int64_t i, const double* q,
           const std::vector<std::vector<double>>& k, const std::vector<std::vector<double>>& v) {
    double max = -1e300, sum = 0;
    std::vector<double> out(kDim, 0.0);
    for (size_t block = 0; block < k.size(); ++block) {
      std::vector<double> scores(k[block].size() / kDim);
      double tile_max = max;
      for (size_t j = 0; j < scores.size(); ++j) {
        double dot = 0;
        for (int64_t d = 0; d < kDim; ++d) dot += q[d] * k[block][j * kDim + d];
        scores[j] = dot * spec_.options.softmax_scale * made.score_scale;
        tile_max = std::max(tile_max, scores[j]);
      }
      const double correction = std::exp(max - tile_max);
      max = tile_max;
      sum *= correction;
      for (double& x : out) x *= correction;
      for (size_t j = 0; j < scores.size(); ++j) {
        const double p = std::exp(scores[j] - max);
        const double stored = made.rounds_p ? RoundToE4m3(256 * p) / 256 : p;
        sum += p;
        for (int64_t d = 0; d < kDim; ++d) {
          out[d] += stored * v[block][j * kDim + d] * made.v_scale;
        }
      }
    }
    for (int64_t d = 0; d < kDim; ++d) {
      Store(DType::kBFloat16, out_.data(), (i * kHeads + h) * kDim + d, out[d] / sum);
    }
    lse_[h * kTokens + i] = static_cast<float>(max + std::log(sum));
  }
};

TEST_F(Float8Test, PassesWhatRoundsAsItSays) {
  for (const int64_t block : {1 << 20, 48, 16, 7}) {
    const Report report = Judge({.block = block});
    EXPECT_TRUE(report.passed()) << block << "\n" << report.ToString();
  }
  const Report sampled = Judge({.block = 48}, {.rows = 60, .whole_cost = 0});
  EXPECT_TRUE(sampled.passed()) << sampled.ToString();
}

TEST_F(Float8Test, RefusesAResultThatIgnoresTheOption) {
  for (const VerifyOptions& options :
       {VerifyOptions(), VerifyOptions{.rows = 60, .whole_cost = 0}}) {
    const Report exact = Judge({.rounds_qk = false, .rounds_v = false, .rounds_p = false}, options);
    EXPECT_TRUE(exact.mismatch()) << exact.ToString();
  }
  // Only q and k, or only v, unrounded; p is rounded.
  EXPECT_TRUE(Judge({.rounds_qk = false}).mismatch());
  EXPECT_TRUE(Judge({.rounds_v = false, .rounds_p = false}).passed());  // more exact than required
}

TEST_F(Float8Test, RefusesWrongScales) {
  EXPECT_TRUE(Judge({.v_scale = 1.1}).mismatch());
  EXPECT_TRUE(Judge({.v_scale = 0.5}).mismatch());
  EXPECT_TRUE(Judge({.score_scale = 1.05}).mismatch());
  EXPECT_TRUE(Judge({.score_scale = 2.0}).mismatch());
}

// An outlier reduces the precision of small values, and the bound grows with that loss.
TEST_F(Float8Test, OutliersAreGranted) {
  for (const double outlier : {300.0, 1e5}) {
    Store(DType::kBFloat16, inputs_.v.data(), 5 * kHeads * kDim, outlier);
    for (const int64_t block : {1 << 20, 16}) {
      const Report report = Judge({.block = block});
      EXPECT_TRUE(report.passed()) << outlier << " " << block << "\n" << report.ToString();
    }
  }
}

TEST(RoundToE4m3, EveryNumberAndTheMiddles) {
  std::vector<double> numbers;
  for (int e = -6; e <= 8; ++e) {
    for (int m = 0; m < 8; ++m) numbers.push_back(std::ldexp(1.0 + m / 8.0, e));
  }
  numbers.pop_back();  // 480 is NaN
  for (int m = 0; m < 8; ++m) numbers.push_back(std::ldexp(m, -9));
  std::sort(numbers.begin(), numbers.end());
  ASSERT_EQ(numbers.size(), 127u);  // all codes except NaN's
  for (size_t i = 0; i + 1 < numbers.size(); ++i) {
    const double low = numbers[i], high = numbers[i + 1], middle = (low + high) / 2;
    for (const double sign : {1.0, -1.0}) {
      EXPECT_EQ(RoundToE4m3(sign * low), sign * low);
      EXPECT_EQ(RoundToE4m3(sign * middle), sign * (i % 2 == 0 ? low : high)) << middle;
      EXPECT_EQ(RoundToE4m3(sign * std::nextafter(middle, 0.0)), sign * low);
      EXPECT_EQ(RoundToE4m3(sign * std::nextafter(middle, 1e3)), sign * high);
    }
  }
}

}  // namespace
}  // namespace ringattn::oracle
