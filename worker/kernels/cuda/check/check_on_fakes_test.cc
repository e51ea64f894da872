#include <random>
#include <vector>

#include "common/oracle/comparator.h"
#include "gtest/gtest.h"
#include "worker/kernels/cuda/check/expected_results.h"
#include "worker/kernels/cuda/check/keep_sets.h"
#include "worker/kernels/cuda/check/part_controls.h"
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
}

TEST(CheckOnFakes, PartsAreParts) { EXPECT_TRUE(PartsAreParts()); }

TEST(CheckOnFakes, KeepSetsAreTheCpus) { EXPECT_EQ(CheckKeepSets(*QueryDevice(0)), 0); }

}  // namespace
}  // namespace ringattn::worker::cuda::check
