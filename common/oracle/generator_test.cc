#include "common/oracle/generator.h"

#include <cmath>
#include <cstring>

#include "common/oracle/numeric.h"
#include "gtest/gtest.h"

namespace ringattn::oracle {
namespace {

TEST(FillNormal, BitsNeverChange) {
  // Old files must stay reproducible.
  EXPECT_EQ(RandomBits(1, 2, 3), RandomBits(1, 2, 3));
  std::vector<float> values(4);
  FillNormal(DType::kFloat32, 42, 1, 0, 4, 1.0, values.data());
  EXPECT_FLOAT_EQ(values[0], -1.27023137f);
  EXPECT_FLOAT_EQ(values[3], -1.37325168f);
}

TEST(FillNormal, PartsEqualTheWhole) {
  std::vector<uint16_t> whole(1000), parts(1000);
  FillNormal(DType::kBFloat16, 7, 3, 0, 1000, 2.0, whole.data());
  FillNormal(DType::kBFloat16, 7, 3, 0, 333, 2.0, parts.data());
  FillNormal(DType::kBFloat16, 7, 3, 333, 667, 2.0, parts.data() + 333);
  EXPECT_EQ(whole, parts);
}

TEST(FillNormal, MomentsAndIndependence) {
  constexpr int64_t kCount = 200000;
  std::vector<float> a(kCount), b(kCount);
  FillNormal(DType::kFloat32, 5, 1, 0, kCount, 3.0, a.data());
  FillNormal(DType::kFloat32, 5, 2, 0, kCount, 3.0, b.data());
  double sum = 0, squares = 0, cross = 0, lagged = 0;
  for (int64_t i = 0; i < kCount; ++i) {
    sum += a[i];
    squares += a[i] * a[i];
    cross += a[i] * b[i];
    if (i > 0) lagged += a[i] * a[i - 1];
  }
  // Five standard deviations of each estimate.
  EXPECT_NEAR(sum / kCount, 0.0, 5 * 3.0 / std::sqrt(kCount));
  EXPECT_NEAR(squares / kCount, 9.0, 5 * 9.0 * 1.3 / std::sqrt(kCount));
  EXPECT_NEAR(cross / kCount, 0.0, 5 * 9.0 / std::sqrt(kCount));
  EXPECT_NEAR(lagged / kCount, 0.0, 5 * 9.0 / std::sqrt(kCount));
}

TEST(SplitDocuments, AddsUpAndHonoursEmpty) {
  bool saw_empty = false;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    for (const int64_t total : {0, 1, 2, 5, 100}) {
      for (const int64_t documents : {1, 2, 5}) {
        const auto loose = SplitDocuments(total, documents, true, seed);
        ASSERT_EQ(loose.size(), documents + 1u);
        ASSERT_EQ(loose.front(), 0);
        ASSERT_EQ(loose.back(), total) << total << " " << documents << " " << seed;
        for (int64_t d = 0; d < documents; ++d) {
          ASSERT_LE(loose[d], loose[d + 1]);
          saw_empty |= loose[d] == loose[d + 1];
        }
        if (total < documents) continue;
        const auto full = SplitDocuments(total, documents, false, seed);
        ASSERT_EQ(full.back(), total);
        for (int64_t d = 0; d < documents; ++d) ASSERT_LT(full[d], full[d + 1]);
      }
    }
  }
  EXPECT_TRUE(saw_empty);
}

TEST(GenerateInputs, HugeScoresReachTenThousand) {
  AttentionSpec spec;
  spec.shape = {.seq_len_q = 64,
                .seq_len_kv = 64,
                .head_dim = 64,
                .head_dim_v = 64,
                .cu_seqlens_q = {0, 64},
                .cu_seqlens_k = {0, 64}};
  spec.options.softmax_scale = 0.125;
  const InputTensors inputs = GenerateInputs(spec, DataKind::kHugeScores, 1, true);
  const Result result = EvaluateAll(spec, inputs.view());
  double largest = 0.0;
  for (const double lse : result.lse.exact) largest = std::max(largest, std::abs(lse));
  EXPECT_GT(largest, 7e3);
  EXPECT_LT(largest, 3e4);
}

}  // namespace
}  // namespace ringattn::oracle
