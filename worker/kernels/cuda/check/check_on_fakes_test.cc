#include <algorithm>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/kernels/cuda/check/judge_cases.h"
#include "worker/kernels/cuda/check/keep_sets.h"
#include "worker/kernels/cuda/check/part_controls.h"
#include "worker/kernels/cuda/check/probability_controls.h"
#include "worker/kernels/cuda/check/random_case.h"
#include "worker/kernels/cuda/check/run_case.h"
#include "worker/kernels/cuda/cuda_kernels.h"

namespace ringattn::worker::cuda::check {
namespace {

void ExpectAllPass(const std::vector<Case>& cases, const Repeats& repeats, SplitCounts& splits) {
  size_t heard = 0;
  JudgeCases(cases, *QueryDevice(0), repeats, splits,
             [&](const Case& c, const Judgement& judgement) {
               ++heard;
               EXPECT_TRUE(judgement.passed()) << c.ToString() << "\n" << judgement.ToString();
               return true;
             });
  EXPECT_EQ(heard, cases.size());
}

// A draw that limits its work after it has chosen rows drops those of batch rows that are gone.
TEST(RandomCaseTest, ChosenRowsExist) {
  for (const auto draw : {RandomCase, RandomTermCase, RandomHopperTermCase, RandomDeterministicCase,
                          RandomDeterministicTermCase, RandomWideCase}) {
    std::mt19937 random(57);
    for (int i = 0; i < 2000; ++i) {
      const Case c = draw(random, /*small=*/false);
      const AttentionShape& shape = c.spec.shape;
      const int64_t batches = shape.packed ? shape.num_documents() : shape.batch;
      for (const ProbabilityRow& row : c.spec.probability_rows) {
        EXPECT_LT(row.batch, batches) << c.ToString();
        EXPECT_LT(row.position, shape.seq_len_q) << c.ToString();
      }
    }
  }
}

TEST(CheckOnFakes, CasesWithTermsPassAndRepeat) {
  std::mt19937 random(11);
  std::vector<Case> cases;
  for (int i = 0; i < 60; ++i) cases.push_back(RandomTermCase(random, /*small=*/true));
  SplitCounts splits;
  ExpectAllPass(cases, GivesTheSame, splits);
  EXPECT_GT(splits.CallsOf("fake", "bias gradient"), 0);
  EXPECT_GT(splits.CallsOf("fake", "backward with dbias"), 0);
  EXPECT_GT(splits.CallsOf("", "partial zeros of dbias"), 0);
  EXPECT_GT(splits.CallsOf("fake", "probabilities"), 10);
  for (const std::string direction : {"forward", "backward", "bias gradient"}) {
    EXPECT_GT(splits.CallsOf("fake", direction + kByKeys), 0) << direction;
  }
  EXPECT_GT(splits.CallsOf("fake", std::string("backward with dbias") + kByKeys), 0);
  EXPECT_GT(splits.CallsOf("", std::string("partial zeros of dbias") + kByKeys), 0);
}

// The check must detect wrong results, which a check that accepts everything would not.
TEST(CheckOnFakes, WhatIsWrongIsHeard) {
  std::mt19937 random(11);
  const std::vector<Case> cases(2, RandomTermCase(random, /*small=*/true));
  SplitCounts splits;
  int heard = 0;
  const auto other = [](const Case&, const CaseOutputs&, const std::function<CaseOutputs()>&) {
    return false;
  };
  JudgeCases(cases, *QueryDevice(0), other, splits, [&](const Case&, const Judgement& judgement) {
    ++heard;
    EXPECT_FALSE(judgement.passed());
    EXPECT_THAT(judgement.ToString(), ::testing::HasSubstr("other bits in a second run"));
    return false;
  });
  EXPECT_EQ(heard, 1);
}

TEST(CheckOnFakes, PartsAreParts) { EXPECT_TRUE(PartsAreParts()); }

TEST(CheckOnFakes, ProbabilitiesAreProbabilities) {
  EXPECT_TRUE(ProbabilitiesAreProbabilities(*QueryDevice(0)));
}

TEST(CheckOnFakes, CasesInE4m3Pass) {
  std::mt19937 random(13);
  std::vector<Case> cases;
  for (int i = 0; i < 60; ++i) cases.push_back(RandomFloat8Case(random, /*small=*/true));
  SplitCounts splits;
  ExpectAllPass(cases, /*repeats=*/nullptr, splits);
}

// The cases give every call buffers in which it may store dk and dv, as the Hopper kernels do.
TEST(CheckOnFakes, PlainCasesPassAndStoreGradientsOfKeys) {
  std::mt19937 random(15);
  std::vector<Case> cases;
  for (int i = 0; i < 40; ++i) cases.push_back(RandomCase(random, /*small=*/true));
  SplitCounts splits;
  ExpectAllPass(cases, /*repeats=*/nullptr, splits);
  for (const char* storing :
       {kStoring, kStoringGroups, kStoringDocuments, kStoringWindows, kStoringBlocks, kLateKeys}) {
    EXPECT_GT(splits.CallsOf("fake", storing), 0) << storing;
  }
}

// The Hopper kernels take the cases that are drawn for them. If their family is missing, another
// family computes these cases, with correct results.
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
  SplitCounts splits;
  ExpectAllPass(cases, /*repeats=*/nullptr, splits);
  EXPECT_EQ(splits.CallsOf("sm90", "forward"), 0);
}

// The same for deterministic cases.
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
    SplitCounts splits;
    ExpectAllPass(cases, GivesTheSame, splits);
  }
}

TEST(CheckOnFakes, KeepSetsAreTheCpus) { EXPECT_EQ(CheckKeepSets(*QueryDevice(0)), 0); }

}  // namespace
}  // namespace ringattn::worker::cuda::check
