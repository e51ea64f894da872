#include "common/plan/kernel_rate.h"

#include "gtest/gtest.h"

namespace ringattn {
namespace {

const std::vector<KernelRate> kRates = {
    {"sm90", {DType::kBFloat16, DType::kFloat16}, Direction::kForward, 6e14},
    {"sm80", {DType::kBFloat16, DType::kFloat16}, Direction::kBackward, 3e14},
    {"simt", {DType::kFloat32}, Direction::kForward, 1e13},
};

AttentionSpec SpecOf(DType dtype) {
  AttentionSpec spec;
  spec.dtype = dtype;
  return spec;
}

TEST(KernelRateTest, DtypeAndDirectionDecide) {
  EXPECT_EQ(RateOf(kRates, SpecOf(DType::kBFloat16), Direction::kForward), &kRates[0]);
  EXPECT_EQ(RateOf(kRates, SpecOf(DType::kFloat16), Direction::kBackward), &kRates[1]);
  EXPECT_EQ(RateOf(kRates, SpecOf(DType::kFloat32), Direction::kForward), &kRates[2]);
}

TEST(KernelRateTest, ScoreTermsDecideToo) {
  std::vector<KernelRate> rates = kRates;
  rates.push_back({"simt", {DType::kFloat32}, Direction::kForward, 1e12, {.score_terms = true}});
  AttentionSpec spec = SpecOf(DType::kFloat32);
  EXPECT_EQ(RateOf(rates, spec, Direction::kForward), &rates[2]);
  spec.options.dropout.threshold = 1;
  EXPECT_EQ(RateOf(rates, spec, Direction::kForward), &rates[3]);
  EXPECT_EQ(RateOf(rates, spec, Direction::kBackward), nullptr);
}

// Tensor-core kernels for multiples of 8 up to 128; all other kernels are far slower.
TEST(KernelRateTest, HeadDimsDecide) {
  const std::vector<KernelRate> rates = {
      {"simt", {DType::kBFloat16}, Direction::kForward, 1e13, {.score_terms = true}},
      {"sm90",
       {DType::kBFloat16},
       Direction::kForward,
       4e14,
       {.score_terms = true, .min_head_dim = 40, .max_head_dim = 128, .head_dim_multiple = 8}},
  };
  AttentionSpec spec = SpecOf(DType::kBFloat16);
  spec.options.segment_ids = true;
  const auto family = [&](int64_t head_dim, int64_t head_dim_v) {
    spec.shape.head_dim = head_dim;
    spec.shape.head_dim_v = head_dim_v;
    return RateOf(rates, spec, Direction::kForward)->family;
  };
  EXPECT_EQ(family(128, 128), "sm90");
  EXPECT_EQ(family(16, 40), "sm90");
  EXPECT_EQ(family(16, 16), "simt");
  EXPECT_EQ(family(132, 132), "simt");
  EXPECT_EQ(family(136, 64), "simt");
  EXPECT_EQ(family(64, 60), "simt");
}

TEST(KernelRateTest, DeterministicBackwardsAndSoftcapsDecideWhereTheDeviceSaysSo) {
  const auto with = [](const char* family, std::optional<bool> deterministic,
                       std::optional<bool> softcap) {
    RequestKind kind;
    kind.deterministic = deterministic;
    kind.softcap = softcap;
    return KernelRate{family, {DType::kBFloat16}, Direction::kBackward, 1e14, kind};
  };
  const std::vector<KernelRate> rates = {with("any order", false, {}), with("ordered", true, false),
                                         with("ordered and capped", true, true)};
  AttentionSpec spec = SpecOf(DType::kBFloat16);
  const auto family = [&] { return RateOf(rates, spec, Direction::kBackward)->family; };
  EXPECT_EQ(family(), "any order");
  spec.options.softcap = 5;
  EXPECT_EQ(family(), "any order");
  spec.options.deterministic = true;
  EXPECT_EQ(family(), "ordered and capped");
  spec.options.softcap = 0;
  EXPECT_EQ(family(), "ordered");
}

TEST(KernelRateTest, NoneIsNotAGuess) {
  EXPECT_EQ(RateOf(kRates, SpecOf(DType::kFloat32), Direction::kBackward), nullptr);
  EXPECT_EQ(RateOf({}, SpecOf(DType::kFloat32), Direction::kForward), nullptr);
}

}  // namespace
}  // namespace ringattn
