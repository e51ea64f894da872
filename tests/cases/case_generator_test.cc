#include "tests/cases/case_generator.h"

#include "gtest/gtest.h"

namespace ringattn::tests {
namespace {

TEST(CaseGenerator, EveryPairIsMet) {
  const Coverage coverage = CoverageOf(GenerateCases(1, 300));
  EXPECT_EQ(coverage.covered_pairs, coverage.pairs) << ToString(coverage);
  EXPECT_GE(coverage.fewest_per_pair, 3) << ToString(coverage);
  EXPECT_GT(coverage.covered_triples * 10, coverage.triples * 9) << ToString(coverage);
}

TEST(CaseGenerator, CaseDoesNotDependOnTheCount) {
  const auto few = GenerateCases(7, 20), many = GenerateCases(7, 60);
  for (size_t i = 0; i < few.size(); ++i) EXPECT_EQ(ToString(few[i]), ToString(many[i]));
  EXPECT_NE(ToString(GenerateCases(8, 1)[0]), ToString(few[0]));
}

// What validation.h promises of a spec.
TEST(CaseGenerator, SpecsAreValid) {
  for (const Case& c : GenerateCases(3, 2000)) {
    const AttentionShape& shape = c.spec.shape;
    ASSERT_GE(shape.batch, 1);
    ASSERT_TRUE(!shape.packed || shape.batch == 1) << ToString(c);
    ASSERT_EQ(shape.num_heads % shape.num_kv_heads, 0);
    for (const int64_t dim : {shape.head_dim, shape.head_dim_v}) {
      ASSERT_GE(dim, 1) << ToString(c);
      ASSERT_LE(dim, 256) << ToString(c);
    }
    ASSERT_EQ(shape.cu_seqlens_q.size(), shape.cu_seqlens_k.size());
    ASSERT_EQ(shape.cu_seqlens_q.back(), shape.seq_len_q);
    ASSERT_EQ(shape.cu_seqlens_k.back(), shape.seq_len_kv);
    if (!shape.packed) {
      ASSERT_EQ(shape.cu_seqlens_q.size(), 2u);
    }
    ASSERT_GE(c.spec.options.window_left, -1);
    ASSERT_GE(c.spec.options.window_right, -1);
  }
}

TEST(CaseGenerator, LevelsMeanWhatTheySay) {
  for (const Case& c : GenerateCases(4, 500)) {
    const AttentionShape& shape = c.spec.shape;
    const int64_t shorter = std::min(shape.seq_len_q, shape.seq_len_kv);
    const std::string& length = LevelNames(kLengthFactor)[c.levels[kLengthFactor]];
    if (length == "uneven") {
      ASSERT_NE(shorter % c.world_size, 0) << ToString(c);
    }
    if (length == "below ring") {
      ASSERT_LT(shorter, c.world_size) << ToString(c);
    }
    const std::string& relation = LevelNames(kRelationFactor)[c.levels[kRelationFactor]];
    ASSERT_EQ(relation == "equal", shape.seq_len_q == shape.seq_len_kv) << ToString(c);
    ASSERT_EQ(relation == "less", shape.seq_len_q < shape.seq_len_kv) << ToString(c);
  }
}

}  // namespace
}  // namespace ringattn::tests
