#include "server/core/requests/planning_cost.h"

#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

constexpr int64_t kTokens = int64_t{1} << 20;

AttentionSpec SpecOf(int64_t documents) {
  AttentionSpec spec;
  spec.shape.seq_len_q = spec.shape.seq_len_kv = kTokens;
  spec.shape.num_heads = spec.shape.num_kv_heads = 8;
  for (int64_t d = 0; d <= documents; ++d) {
    spec.shape.cu_seqlens_q.push_back(d * kTokens / documents);
  }
  spec.shape.cu_seqlens_k = spec.shape.cu_seqlens_q;
  spec.shape.packed = documents > 1;
  return spec;
}

// One document, divided into segments.
AttentionSpec DilatedOf(int64_t segment_length, int64_t rate) {
  AttentionSpec spec = SpecOf(1);
  spec.options.dilation_levels = {{segment_length, rate, std::nullopt, 0, spec.shape.num_heads}};
  return spec;
}

double SecondsOf(const AttentionSpec& spec, const PlanChoice& choice = {}) {
  PlannerInputs inputs;
  inputs.ready_workers = 4;
  return PlanningCostSeconds(spec, choice, inputs);
}

TEST(PlanningCost, SegmentsCostAsMuchAsDocuments) {
  EXPECT_LT(SecondsOf(SpecOf(1)), 1e-3);
  PlanChoice chosen;  // fixed, because documents give the planner a choice
  chosen.layout = Layout::kContiguous;
  const double documents = SecondsOf(SpecOf(kTokens / 4), chosen);
  EXPECT_GT(documents, 0.1);
  EXPECT_DOUBLE_EQ(SecondsOf(DilatedOf(4, 1), chosen), documents);
  EXPECT_DOUBLE_EQ(SecondsOf(DilatedOf(4, 1)), documents);
  EXPECT_LT(SecondsOf(DilatedOf(kTokens, 1)), 1e-3);
}

TEST(PlanningCost, EveryOffsetAddsSegments) {
  EXPECT_NEAR(SecondsOf(DilatedOf(64, 8)) / SecondsOf(DilatedOf(64, 1)), 8, 0.5);
  PlanChoice striped;
  striped.layout = Layout::kStriped;
  striped.stripe = 64;
  const double one = SecondsOf(DilatedOf(kTokens, 1), striped);
  EXPECT_NEAR(SecondsOf(DilatedOf(kTokens, 8), striped) / one, 8, 0.5);
}

// One segment each, but a program for each of the offsets.
TEST(PlanningCost, EveryOffsetAddsAProgram) {
  AttentionSpec spec = DilatedOf(kTokens, kTokens);
  spec.shape.num_heads = spec.options.dilation_levels[0].head_end = 1024;
  EXPECT_GT(SecondsOf(spec), 0.1);
}

}  // namespace
}  // namespace ringattn::server
