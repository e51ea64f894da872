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
  rates.push_back({"simt", {DType::kFloat32}, Direction::kForward, 1e12, /*score_terms=*/true});
  AttentionSpec spec = SpecOf(DType::kFloat32);
  EXPECT_EQ(RateOf(rates, spec, Direction::kForward), &rates[2]);
  spec.options.dropout.threshold = 1;
  EXPECT_EQ(RateOf(rates, spec, Direction::kForward), &rates[3]);
  EXPECT_EQ(RateOf(rates, spec, Direction::kBackward), nullptr);
}

TEST(KernelRateTest, NoneIsNotAGuess) {
  EXPECT_EQ(RateOf(kRates, SpecOf(DType::kFloat32), Direction::kBackward), nullptr);
  EXPECT_EQ(RateOf({}, SpecOf(DType::kFloat32), Direction::kForward), nullptr);
}

}  // namespace
}  // namespace ringattn
