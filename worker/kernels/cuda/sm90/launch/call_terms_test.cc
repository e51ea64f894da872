#include "worker/kernels/cuda/sm90/launch/call_terms.h"

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "worker/kernels/cuda/plan/tile_plan.h"
#include "worker/kernels/cuda/sm90/launch/backward.h"
#include "worker/kernels/cuda/sm90/launch/forward.h"

namespace ringattn::worker::cuda::sm90 {
namespace {

constexpr DeviceInfo kH200{132, 9, 227 << 10};

AttentionProblem ProblemOf(int64_t dim) {
  AttentionProblem problem;
  problem.dtype = DType::kBFloat16;
  problem.batch = 2;
  problem.num_heads = 4;
  problem.num_kv_heads = 2;
  problem.head_dim = problem.head_dim_v = dim;
  problem.bands = {Band{.upper = 0}};
  problem.terms.shifts = {0};
  problem.terms.columns = 1000;
  return problem;
}

// 1,000 causal tokens, without addresses: the call only measures sizes.
template <typename Call>
Call CallOf(const AttentionProblem& problem) {
  Call call;
  call.problem = &problem;
  call.q_rows = 1000;
  call.q_pieces = {Piece{.length = 1000}};
  call.blocks = {{1000, {Piece{.length = 1000}}}};
  return call;
}

TEST(CallTermsTest, PairsAreCountedThroughTheRanges) {
  std::vector<KvRange> ranges(4);
  ranges[0].row_count = 1;
  ranges[1].row_count = 128;
  ranges[2].row_count = 129;
  ranges[3].row_count = 1000;
  EXPECT_EQ(PairBegins(ranges, 128), (std::vector<int64_t>{0, 1, 2, 4, 12}));
  EXPECT_EQ(PairBegins(std::vector<QRange>(), 64), std::vector<int64_t>{0});
}

TEST(CallTermsTest, ScratchHoldsClassesAndMaskWords) {
  AttentionProblem problem = ProblemOf(128);
  const auto call = CallOf<ForwardCall>(problem);
  ForwardTileShape shape;
  shape.q_rows = shape.keys = 128;
  const ForwardPlan plan = PlanForwardTiles(call, shape);
  ASSERT_EQ(PairBegins(plan.ranges, 128).back(), 36);  // 8 tiles, of 1 to 8 key tiles

  problem.terms.alibi_slopes.assign(4, 0.5f);
  CallTerms alibi;
  ASSERT_TRUE(alibi.Init(call, plan, 128, 128, 4).ok());
  EXPECT_EQ(alibi.scratch_bytes(), 0);

  problem.terms.segment_ids = true;
  CallTerms ids;
  ASSERT_TRUE(ids.Init(call, plan, 128, 128, 4).ok());
  EXPECT_EQ(ids.scratch_bytes(), 256);  // 2 * 36 bytes, rounded up

  problem.terms.mask = MaskForm{.per_batch = true, .per_head = true};
  CallTerms all;
  ASSERT_TRUE(all.Init(call, plan, 128, 128, 4).ok());
  EXPECT_EQ(all.scratch_bytes(), 256 + 512 + 8 * 36 * (128 * 128 / 8));

  // Each table is at the address from which the kernels read it.
  std::vector<char> tables(all.table_bytes()), scratch(all.scratch_bytes());
  all.WriteTables(tables.data());
  TermParams terms;
  PairTables pairs;
  all.Place(tables.data(), scratch.data(), terms, pairs);
  EXPECT_EQ(pairs.pairs, 36);
  EXPECT_EQ(pairs.mask_planes, 8);
  EXPECT_EQ(terms.slopes[3], 0.5f);
  const std::vector<int64_t> begins = PairBegins(plan.ranges, 128);
  for (size_t i = 0; i < plan.ranges.size(); ++i) {
    EXPECT_EQ(pairs.pair_begin[i], begins[i]);
    const TermRange& range = terms.ranges[i];
    EXPECT_EQ(range.k_position, plan.ranges[i].row_begin);
  }
  EXPECT_EQ(pairs.mask_classes - reinterpret_cast<uint8_t*>(scratch.data()), 256);
  EXPECT_EQ(static_cast<uint8_t*>(pairs.mask_words) - pairs.mask_classes, 512);
}

TEST(CallTermsTest, TooManyPairsAreRefused) {
  const AttentionProblem problem = ProblemOf(64);
  auto call = CallOf<ForwardCall>(problem);
  ForwardPlan plan;
  plan.ranges.resize(20);
  for (KvRange& range : plan.ranges) range.row_count = 2'000'000'000;
  plan.tiles = {};
  CallTerms terms;
  EXPECT_EQ(terms.Init(call, plan, 128, 16, 4).code(), absl::StatusCode::kResourceExhausted);
}

TEST(CallTermsTest, WhatIsServed) {
  for (int64_t dim : {40, 64, 72, 128, 136, 256}) {
    AttentionProblem problem = ProblemOf(dim);
    problem.terms.segment_ids = true;
    EXPECT_EQ(ServesForward(problem, kH200), dim <= 128) << dim;
    EXPECT_EQ(ServesBackward(problem, kH200), dim <= 128) << dim;
    problem.terms.dropout.threshold = 1;
    problem.softcap = 30;
    EXPECT_EQ(ServesForward(problem, kH200), dim <= 128) << dim;
    EXPECT_FALSE(ServesBackward(problem, kH200)) << dim;
  }
  AttentionProblem problem = ProblemOf(64);
  problem.terms.segment_ids = true;
  problem.dtype = DType::kFloat32;
  EXPECT_FALSE(ServesForward(problem, kH200));
  problem.dtype = DType::kFloat16;
  EXPECT_FALSE(ServesForward(problem, {108, 8, 163 << 10}));
}

TEST(CallTermsTest, DropoutHasKernelsOfItsOwnAndABiasThoseOfAllTerms) {
  AttentionProblem problem = ProblemOf(64);
  problem.terms.alibi_slopes.assign(4, 0.5f);
  problem.terms.mask = MaskForm{};
  EXPECT_EQ(TermKindOf(problem), TermKind::kPairs);
  problem.terms.bias = BiasForm{};
  EXPECT_EQ(TermKindOf(problem), TermKind::kAll);
  problem.terms.dropout.threshold = 1;
  EXPECT_EQ(TermKindOf(problem), TermKind::kAll);
  problem.terms.bias.reset();
  EXPECT_EQ(TermKindOf(problem), TermKind::kDrops);
}

// Slopes must be far from fp32's limits, and segment ids and masks are the only other terms.
TEST(CallTermsTest, AlibiIsAPartOfTheProduct) {
  AttentionProblem problem = ProblemOf(64);
  problem.terms.segment_ids = true;
  EXPECT_FALSE(AlibiInProduct(problem));
  const auto with = [&problem](float slope) {
    problem.terms.alibi_slopes = {0.5f, slope, 0.0f, -0.3f};
    return AlibiInProduct(problem);
  };
  for (float slope : {1.0f, 0.0f, -2.0f, 1e-12f, 1e12f}) EXPECT_TRUE(with(slope)) << slope;
  for (float slope : {1e-30f, 1e30f, -1e30f, 1e-40f}) EXPECT_FALSE(with(slope)) << slope;
  for (float scale : {0.0f, -1.0f, 1e-30f}) {
    problem.softmax_scale = scale;
    EXPECT_FALSE(with(1.0f)) << scale;
  }
  problem.softmax_scale = 1.0f;
  problem.softcap = 30.0f;
  EXPECT_FALSE(with(1.0f));
  problem.softcap = 0.0f;
  problem.terms.dropout.threshold = 1;
  EXPECT_FALSE(with(1.0f));
}

// A prepared call places its terms' tables and scratch memory after those of the plan. Plain calls
// have none.
TEST(CallTermsTest, PreparedCallsBringTheirTables) {
  AttentionProblem problem = ProblemOf(128);
  const auto forward_bytes = [&] {
    auto call = CallOf<ForwardCall>(problem);
    call.initial = call.final = true;
    const auto prepared = PreparedForward::Create(call, kH200, {.max_key_splits = 1});
    EXPECT_TRUE(prepared.ok()) << prepared.status();
    std::vector<char> tables((*prepared)->table_bytes());
    (*prepared)->WriteTables(tables.data());
    return std::pair((*prepared)->table_bytes(), (*prepared)->scratch_bytes());
  };
  const auto backward_bytes = [&] {
    const auto prepared = PreparedBackward::Create(CallOf<BackwardCall>(problem), kH200);
    EXPECT_TRUE(prepared.ok()) << prepared.status();
    std::vector<char> tables((*prepared)->table_bytes());
    (*prepared)->WriteTables(tables.data());
    return std::pair((*prepared)->table_bytes(), (*prepared)->scratch_bytes());
  };
  const auto names = [&] {
    auto call = CallOf<ForwardCall>(problem);
    return std::pair(
        (*PreparedForward::Create(call, kH200, {}))->name().kernel_class,
        (*PreparedBackward::Create(CallOf<BackwardCall>(problem), kH200))->name().kernel_class);
  };
  EXPECT_EQ(names(), std::pair(kPlainKernelClass, kPlainKernelClass));
  const auto plain_forward = forward_bytes(), plain_backward = backward_bytes();
  EXPECT_EQ(plain_forward.second, 0);
  EXPECT_EQ(plain_backward.second, 0);
  problem.terms.mask = MaskForm{};
  EXPECT_EQ(names(), std::pair(kTermKernelClass, kTermKernelClass));
  const auto masked_forward = forward_bytes(), masked_backward = backward_bytes();
  EXPECT_GT(masked_forward.first, plain_forward.first);
  EXPECT_GT(masked_backward.first, plain_backward.first);
  EXPECT_EQ(masked_forward.second, 256 + 36 * 2048);
  EXPECT_GT(masked_backward.second, 64 * 1024);
}

}  // namespace
}  // namespace ringattn::worker::cuda::sm90
