#include "common/attention/merge.h"

#include <cmath>
#include <limits>

#include "gtest/gtest.h"

namespace ringattn {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST(MergeTest, TwoEmptyPartialsStayEmpty) {
  const MergeWeights merged = MergeLse(-kInfinity, -kInfinity);
  EXPECT_EQ(merged.first, 0.0f);
  EXPECT_EQ(merged.second, 0.0f);
  EXPECT_EQ(merged.lse, -kInfinity);
}

TEST(MergeTest, AnEmptyPartialChangesNothing) {
  const MergeWeights right = MergeLse(3.5f, -kInfinity);
  EXPECT_EQ(right.first, 1.0f);
  EXPECT_EQ(right.second, 0.0f);
  EXPECT_EQ(right.lse, 3.5f);
  const MergeWeights left = MergeLse(-kInfinity, -2.0f);
  EXPECT_EQ(left.first, 0.0f);
  EXPECT_EQ(left.second, 1.0f);
  EXPECT_EQ(left.lse, -2.0f);
}

TEST(MergeTest, MatchesTheDefinitionAndTheSigmoidForm) {
  for (float a : {-1e4f, -3.0f, 0.0f, 0.1f, 20.0f, 1e4f}) {
    for (float b : {-1e4f, -2.9f, 0.0f, 5.0f, 1e4f}) {
      const MergeWeights merged = MergeLse(a, b);
      const double second = 1.0 / (1.0 + std::exp(double{a} - double{b}));
      EXPECT_NEAR(merged.second, second, 1e-6);
      EXPECT_NEAR(merged.first + merged.second, 1.0, 1e-6);
      const double max = std::max(a, b);
      const double lse = max + std::log(std::exp(a - max) + std::exp(b - max));
      EXPECT_NEAR(merged.lse, lse, 1e-6 * std::max(1.0, std::abs(lse)));
    }
  }
}

TEST(MergeTest, OrderOfThreePartialsDoesNotMatter) {
  const float lse[3] = {1.0f, -4.0f, 2.5f};
  const float out[3] = {0.3f, -7.0f, 11.0f};
  const int orders[3][3] = {{0, 1, 2}, {2, 1, 0}, {1, 2, 0}};
  for (const auto& order : orders) {
    float o = 0.0f;
    float l = -kInfinity;
    for (int i : order) {
      const MergeWeights merged = MergeLse(l, lse[i]);
      o = merged.first * o + merged.second * out[i];
      l = merged.lse;
    }
    const double z = std::exp(1.0) + std::exp(-4.0) + std::exp(2.5);
    EXPECT_NEAR(l, std::log(z), 1e-6);
    EXPECT_NEAR(o, (0.3 * std::exp(1.0) - 7.0 * std::exp(-4.0) + 11.0 * std::exp(2.5)) / z, 1e-5);
  }
}

TEST(MergeTest, NanShows) {
  EXPECT_TRUE(std::isnan(MergeLse(kNan, 1.0f).lse));
  EXPECT_TRUE(std::isnan(MergeLse(1.0f, kNan).lse));
  EXPECT_TRUE(std::isnan(MergeLse(kNan, -kInfinity).lse));
  EXPECT_TRUE(std::isnan(MergeLse(-kInfinity, kNan).lse));
  EXPECT_TRUE(std::isnan(MergeLse(kNan, -kInfinity).first));
}

}  // namespace
}  // namespace ringattn
