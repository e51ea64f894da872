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

// A GPU's tensor cores do not sum in a fixed order: such a backward is as slow as score terms.
TEST(KernelRateTest, ADeterministicBackwardHasTheRateOfScoreTerms) {
  std::vector<KernelRate> rates = kRates;
  rates.push_back({"simt", {DType::kBFloat16}, Direction::kBackward, 5e12, /*score_terms=*/true});
  AttentionSpec spec = SpecOf(DType::kBFloat16);
  spec.options.deterministic = true;
  EXPECT_EQ(RateOf(rates, spec, Direction::kForward), &rates[0]);
  EXPECT_EQ(RateOf(rates, spec, Direction::kBackward), &rates[3]);
}

TEST(KernelRateTest, NoneIsNotAGuess) {
  EXPECT_EQ(RateOf(kRates, SpecOf(DType::kFloat32), Direction::kBackward), nullptr);
  EXPECT_EQ(RateOf({}, SpecOf(DType::kFloat32), Direction::kForward), nullptr);
}

}  // namespace
}  // namespace ringattn
