#include "worker/kernels/cuda/sm90/launch/backward_deal.h"

#include <cstdint>

#include <gtest/gtest.h>

#include "worker/kernels/cuda/launch/prepare_backward.h"

namespace ringattn::worker::cuda::sm90 {
namespace {

constexpr int kSms = 132;

struct Shape {
  int64_t tokens;
  bool causal;
  int64_t heads, kv_heads;
  int64_t batch = 1;
  int64_t dim = 128;
};

BackwardWork Work(const Shape& shape) {
  AttentionProblem problem;
  problem.dtype = DType::kBFloat16;
  problem.num_heads = shape.heads;
  problem.num_kv_heads = shape.kv_heads;
  problem.batch = shape.batch;
  problem.head_dim = problem.head_dim_v = shape.dim;
  problem.bands = {shape.causal ? Band{-shape.tokens, 0} : Band{}};
  BackwardCall call;
  call.problem = &problem;
  call.q_rows = shape.tokens;
  call.q_pieces = {Piece{0, shape.tokens, 0, 0, 1}};
  KvBlock block;
  block.rows = shape.tokens;
  block.pieces = call.q_pieces;
  call.blocks = {block};
  BackwardKernel kernel;
  kernel.tile_rows = shape.dim == 64 ? 128 : 64;
  kernel.block_keys = shape.dim > 128 ? 64 : 128;
  kernel.blocks = shape.dim > 128 ? 2 : 1;
  const int32_t keys = kernel.tile_keys();
  return WorkOf(call, PlanBackwardTiles(call, keys), kernel, keys, shape.dim);
}

TEST(BackwardDealTest, CountsTheWork) {
  const BackwardWork causal = Work({512, true, 8, 2, 3});
  EXPECT_EQ(causal.query_tiles, (std::vector<int32_t>{8, 6, 4, 2}));
  EXPECT_EQ(causal.num_heads, 8);
  EXPECT_EQ(causal.group_size, 4);
  EXPECT_EQ(causal.batch, 3);
  EXPECT_EQ(causal.tile_operations, 10 * 64 * 128 * 128);
  EXPECT_EQ(causal.tile_sums, 128 * 256);
  EXPECT_EQ(causal.sums, 3 * 512 * 2 * 256);
  EXPECT_EQ(causal.head_bytes, 512 * 128 * 8);
  EXPECT_EQ(Work({300, false, 8, 2}).query_tiles, (std::vector<int32_t>{5, 5, 5}));

  // Two thread blocks share a tile of keys.
  const BackwardWork wide = Work({512, true, 8, 2, 3, 192});
  EXPECT_EQ(wide.query_tiles, causal.query_tiles);
  EXPECT_EQ(wide.tile_operations, 10 * 64 * 64 * 192);
  EXPECT_EQ(wide.tile_sums, 128 * 384);
}

TEST(BackwardDealTest, SectionsAreAboutOneWave) {
  EXPECT_EQ(SectionPacks(0, 8, kSms), 1);
  EXPECT_EQ(SectionPacks(32, 0, kSms), 1);
  EXPECT_EQ(SectionPacks(32, 8, kSms), 4);
  EXPECT_EQ(SectionPacks(32, 9, kSms), 3);  // sections of equal size
  EXPECT_EQ(SectionPacks(1000, 8, kSms), 1);
}

TEST(BackwardDealTest, BlocksGoToWhoeverIsIdle) {
  BackwardWork work;
  work.query_tiles = {5, 3, 1, 1};
  work.num_heads = 2;
  work.group_size = 2;
  work.tile_operations = int64_t{1} << 40;  // block starts are negligible
  const double tile = BlocksTime(work, 2, true, 1) / 20;
  EXPECT_NEAR(BlocksTime(work, 1, true, 1) / tile, 20, 0.01);
  EXPECT_NEAR(BlocksTime(work, 2, true, 2) / tile, 10, 0.01);
  EXPECT_NEAR(BlocksTime(work, 2, true, 100) / tile, 10, 0.01);  // the longest block
  EXPECT_NEAR(BlocksTime(work, 1, true, 100) / tile, 5, 0.01);
  // In sections of one head: 5 and 3, then 1 and 1 after the 3, and the same again.
  EXPECT_NEAR(BlocksTime(work, 1, true, 2) / tile, 10, 0.01);
  work.num_heads = 4;
  EXPECT_NEAR(BlocksTime(work, 2, true, 1) / tile, 40, 0.01);
  work.batch = 3;
  EXPECT_NEAR(BlocksTime(work, 2, true, 1) / tile, 120, 0.01);
}

TEST(BackwardDealTest, StoringTakesLessThanAdding) {
  const BackwardWork work = Work({4096, false, 32, 8});
  EXPECT_LT(BlocksTime(work, 4, true, kSms), BlocksTime(work, 4, false, kSms));
  EXPECT_LT(BlocksTime(work, 4, false, kSms), BlocksTime(work, 1, false, kSms));
}

// Calls BestHeads as PreparedBackward does, for shapes whose usual blocks have less than a group.
int32_t Heads(const Shape& shape, bool can_store) {
  const BackwardWork work = Work(shape);
  const int64_t tiles = static_cast<int64_t>(work.query_tiles.size()) * shape.batch;
  const int slots = shape.dim > 128 ? kSms / 2 : kSms;
  const int32_t usual = HeadsPerBlock(work.group_size, shape.heads, tiles, 3 * slots);
  EXPECT_LT(usual, work.group_size) << shape.tokens;
  return BestHeads(work, usual, can_store, slots);
}
bool Pays(const Shape& shape) { return Heads(shape, true) == shape.heads / shape.kv_heads; }

// Two waves of whole groups are as balanced as more waves of smaller blocks. The shortest blocks of
// a causal call run after the neighbours of the longest ones, and each multiprocessor's work equals
// the longest block. A causal call's queries must approximately fit the cache.
TEST(BackwardDealTest, StoringPaysWhereBlocksFillTheirWaves) {
  for (const bool causal : {true, false}) {
    for (const int64_t dim : {64, 96, 128}) {
      EXPECT_TRUE(Pays({4096, causal, 32, 8, 1, dim})) << causal << dim;
      EXPECT_TRUE(Pays({2048, causal, 32, 8, 2, dim})) << causal << dim;
      EXPECT_EQ(Pays({4096, causal, 64, 8, 1, dim}), !causal || dim == 64) << causal << dim;
      EXPECT_EQ(Pays({4096, causal, 16, 2, 4, dim}), !causal || dim == 64) << causal << dim;
    }
    for (const int64_t dim : {192, 256}) {
      EXPECT_TRUE(Pays({2048, causal, 32, 8, 1, dim})) << causal << dim;
      EXPECT_EQ(Pays({4096, causal, 16, 2, 2, dim}), !causal) << causal << dim;
    }
  }
  // One wave of equal blocks.
  EXPECT_TRUE(Pays({2048, false, 32, 8}));
  EXPECT_TRUE(Pays({8192, false, 16, 2}));
}

TEST(BackwardDealTest, StoringDoesNotPayWhereWholeGroupsLeaveMultiprocessorsIdle) {
  // One wave whose longest block is twice the mean.
  EXPECT_FALSE(Pays({2048, true, 32, 8}));
  EXPECT_FALSE(Pays({8192, true, 16, 2}));
  // Less than a wave.
  for (const bool causal : {true, false}) {
    EXPECT_FALSE(Pays({1024, causal, 32, 8})) << causal;
    EXPECT_FALSE(Pays({1024, causal, 64, 8})) << causal;
    EXPECT_FALSE(Pays({4096, causal, 16, 2})) << causal;
    EXPECT_FALSE(Pays({2048, causal, 16, 2})) << causal;
    EXPECT_FALSE(Pays({4096, causal, 32, 1})) << causal;
  }
  // A little more than a wave.
  EXPECT_FALSE(Pays({2176, false, 32, 8}));
}

// If blocks of whole groups are too long, blocks of several heads can be as balanced as blocks of
// one.
TEST(BackwardDealTest, FewerBlocksAreBetterWhereTheyAreAsEven) {
  for (const bool can_store : {false, true}) {
    EXPECT_EQ(Heads({2048, true, 32, 8}, can_store), 2);  // the usual number is 1
    EXPECT_EQ(Heads({2048, false, 16, 2}, can_store), 2);
    EXPECT_EQ(Heads({4096, true, 16, 2}, can_store), 2);
    EXPECT_EQ(Heads({1024, true, 64, 8}, can_store), 2);
    EXPECT_EQ(Heads({1024, true, 32, 8}, can_store), 1);
    EXPECT_EQ(Heads({1024, true, 16, 2}, can_store), 1);
  }
  EXPECT_EQ(Heads({4096, true, 32, 8}, false), 4);  // two waves rather than four
}

TEST(BackwardDealTest, GroupsOfAnySizeAreDealt) {
  EXPECT_EQ(Heads({4096, true, 12, 2}, true), 2);
  EXPECT_EQ(Heads({1024, false, 7, 1}, false), 1);
  EXPECT_EQ(Heads({128, false, 15, 5, 3}, false), 1);
}

// The sums of long calls are small compared with the products, so the model cannot be sure of a
// gain.
TEST(BackwardDealTest, StoringMustPayMoreThanDoubt) { EXPECT_FALSE(Pays({16384, true, 16, 2})); }

}  // namespace
}  // namespace ringattn::worker::cuda::sm90
