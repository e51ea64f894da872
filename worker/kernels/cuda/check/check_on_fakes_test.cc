#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "common/oracle/comparator.h"
#include "gtest/gtest.h"
#include "worker/kernels/cuda/check/expected_results.h"
#include "worker/kernels/cuda/check/keep_sets.h"
#include "worker/kernels/cuda/check/part_controls.h"
#include "worker/kernels/cuda/check/probability_controls.h"
#include "worker/kernels/cuda/check/random_case.h"
#include "worker/kernels/cuda/check/run_case.h"
#include "worker/kernels/cuda/cuda_kernels.h"

namespace ringattn::worker::cuda::check {
namespace {

TEST(CheckOnFakes, CasesWithTermsPassAndRepeat) {
  std::mt19937 random(11);
  std::vector<Case> cases;
  for (int i = 0; i < 60; ++i) cases.push_back(RandomTermCase(random, /*small=*/true));
  ExpectedResults all(cases);
  SplitCounts splits;
  const DeviceInfo device = *QueryDevice(0);
  for (const Case& c : cases) {
    SCOPED_TRACE(c.ToString());
    const auto expected = all.Take();
    const CaseOutputs outputs = RunCase(c, *expected, device, splits);
    const oracle::Report report = oracle::Compare(c.spec, expected->result, outputs.view());
    EXPECT_TRUE(report.passed()) << report.ToString();
    EXPECT_TRUE(outputs.intact);
    EXPECT_TRUE(RunCase(c, *expected, device, splits) == outputs);
  }
  EXPECT_GT(splits.CallsOf("fake", "bias gradient"), 0);
  EXPECT_GT(splits.CallsOf("fake", "probabilities"), 10);
}

TEST(CheckOnFakes, PartsAreParts) { EXPECT_TRUE(PartsAreParts()); }

TEST(CheckOnFakes, ProbabilitiesAreProbabilities) {
  EXPECT_TRUE(ProbabilitiesAreProbabilities(*QueryDevice(0)));
}

TEST(CheckOnFakes, CasesInE4m3Pass) {
  std::mt19937 random(13);
  std::vector<Case> cases;
  for (int i = 0; i < 60; ++i) cases.push_back(RandomFloat8Case(random, /*small=*/true));
  ExpectedResults all(cases);
  SplitCounts splits;
  for (const Case& c : cases) {
    SCOPED_TRACE(c.ToString());
    const auto expected = all.Take();
    const CaseOutputs outputs = RunCase(c, *expected, *QueryDevice(0), splits);
    const oracle::Report report = oracle::Compare(
        c.spec, expected->result, {.out = outputs.out.data(), .lse = outputs.lse.data()});
    EXPECT_TRUE(report.passed()) << report.ToString();
    EXPECT_TRUE(outputs.intact);
  }
}

// What is drawn for the Hopper kernels they take, and right on other kernels too, to which a case
// goes whose family is not there.
TEST(CheckOnFakes, HopperCasesAreWhatItsKernelsTake) {
  std::mt19937 random(12);
  std::vector<Case> cases;
  for (int i = 0; i < 200; ++i) {
    cases.push_back(RandomHopperTermCase(random, /*small=*/true));
    const Case& c = cases.back();
    const int64_t dims[] = {c.spec.shape.head_dim, c.spec.shape.head_dim_v};
    EXPECT_NE(c.spec.dtype, DType::kFloat32);
    EXPECT_TRUE(HasScoreTerms(c.spec.options));
    EXPECT_FALSE(c.spec.options.deterministic || c.hostile);
    for (int64_t dim : dims) EXPECT_TRUE(dim % 8 == 0 && dim <= 128) << dim;
    EXPECT_GT(std::max(dims[0], dims[1]), 32);
  }
  cases.resize(10);
  ExpectedResults all(cases);
  SplitCounts splits;
  for (const Case& c : cases) {
    SCOPED_TRACE(c.ToString());
    const auto expected = all.Take();
    const CaseOutputs outputs = RunCase(c, *expected, *QueryDevice(0), splits);
    const oracle::Report report = oracle::Compare(c.spec, expected->result, outputs.view());
    EXPECT_TRUE(report.passed()) << report.ToString();
  }
  EXPECT_EQ(splits.CallsOf("sm90", "forward"), 0);
}

// Likewise, and every one deterministic.
TEST(CheckOnFakes, DeterministicCasesAreWhatHoppersKernelsTake) {
  std::mt19937 random(14);
  for (const auto draw : {RandomDeterministicCase, RandomDeterministicTermCase}) {
    const bool terms = draw == RandomDeterministicTermCase;
    std::vector<Case> cases;
    for (int i = 0; i < 200; ++i) {
      cases.push_back(draw(random, /*small=*/true));
      const Case& c = cases.back();
      const int64_t dims[] = {c.spec.shape.head_dim, c.spec.shape.head_dim_v};
      EXPECT_TRUE(c.spec.options.deterministic);
      EXPECT_NE(c.spec.dtype, DType::kFloat32);
      EXPECT_EQ(HasScoreTerms(c.spec.options), terms);
      for (int64_t dim : dims) EXPECT_TRUE(dim % 8 == 0 && dim <= (terms ? 128 : 256)) << dim;
      EXPECT_GT(std::max(dims[0], dims[1]), 32);
    }
    cases.resize(5);
    ExpectedResults all(cases);
    SplitCounts splits;
    for (const Case& c : cases) {
      SCOPED_TRACE(c.ToString());
      const auto expected = all.Take();
      const CaseOutputs outputs = RunCase(c, *expected, *QueryDevice(0), splits);
      const oracle::Report report = oracle::Compare(c.spec, expected->result, outputs.view());
      EXPECT_TRUE(report.passed()) << report.ToString();
      EXPECT_TRUE(RunCase(c, *expected, *QueryDevice(0), splits) == outputs);
    }
  }
}

TEST(CheckOnFakes, KeepSetsAreTheCpus) { EXPECT_EQ(CheckKeepSets(*QueryDevice(0)), 0); }

}  // namespace
}  // namespace ringattn::worker::cuda::check
