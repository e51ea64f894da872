#include "worker/kernels/cuda/plan/probability_plan.h"

#include <cstdint>
#include <map>
#include <random>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

namespace ringattn::worker::cuda {
namespace {

// Number of a chosen row, address of a block, index of a key in it.
using Met = std::map<std::tuple<int32_t, const void*, int64_t>, int>;

struct Problem {
  AttentionProblem problem;
  ProbabilitiesCall call;
};

std::vector<Piece> RandomPieces(std::mt19937& random, int64_t documents, int64_t* rows) {
  std::vector<Piece> pieces;
  for (int count = 1 + random() % 4; count > 0; --count) {
    Piece piece;
    piece.local_begin = *rows;
    piece.length = random() % 150;
    piece.document = random() % documents;
    piece.position = random() % 100;
    piece.stride = 1 + random() % 3;
    *rows += piece.length;
    pieces.push_back(piece);
  }
  *rows += random() % 3;  // without a document
  return pieces;
}

void Fill(std::mt19937& random, Problem& made) {
  AttentionProblem& problem = made.problem;
  const int64_t documents = 1 + random() % 3;
  problem.batch = 1 + random() % 2;
  problem.num_kv_heads = 1 + random() % 2;
  problem.num_heads = problem.num_kv_heads * (random() % 4 == 0 ? 100 : 1 + random() % 6);
  for (int64_t i = 0; i < documents; ++i) {
    Band band;
    if (random() % 2) band.upper = static_cast<int64_t>(random() % 60) - 20;
    if (random() % 2) band.lower = -static_cast<int64_t>(random() % 60);
    problem.bands.push_back(band);
    problem.terms.shifts.push_back(10 * i);
  }
  ProbabilitiesCall& call = made.call;
  call.problem = &problem;
  call.q_pieces = RandomPieces(random, documents, &call.q_rows);
  for (int64_t i = 0; i < 2; ++i) {
    KvBlock block;
    block.pieces = RandomPieces(random, documents, &block.rows);
    block.k = reinterpret_cast<const void*>(4096 * (i + 1));
    call.blocks.push_back(block);
  }
  for (int count = call.q_rows == 0 ? 0 : random() % 40; count > 0; --count) {
    call.rows.push_back({static_cast<int64_t>(random() % problem.batch),
                         static_cast<int64_t>(random() % call.q_rows)});
  }
}

// The pairs by the call's definition, for each query head of a key head.
Met Expected(const ProbabilitiesCall& call, int group_size) {
  Met met;
  for (size_t i = 0; i < call.rows.size(); ++i) {
    for (const Piece& q : call.q_pieces) {
      const int64_t row = call.rows[i].row - q.local_begin;
      if (row < 0 || row >= q.length) continue;
      for (const KvBlock& block : call.blocks) {
        for (const Piece& k : block.pieces) {
          for (int64_t c = 0; c < k.length && k.document == q.document; ++c) {
            const int64_t difference = k.PositionOf(c) - q.PositionOf(row);
            const Band& band = call.problem->bands[q.document];
            if (difference < band.lower || difference > band.upper) continue;
            met[{static_cast<int32_t>(i), block.k, k.local_begin + c}] = group_size;
          }
        }
      }
    }
  }
  return met;
}

// Walks the tables as a kernel does.
Met Walk(const ProbabilityPlan& plan, int group_size) {
  Met met;
  for (const ProbabilityTile& tile : plan.tiles) {
    EXPECT_GT(tile.pair_count, 0);
    EXPECT_LE(tile.pair_count, plan.tile_pairs);
    EXPECT_GT(tile.row_count, 0);
    const ChosenRowLocation& first = plan.rows[tile.pair_begin / group_size];
    for (int32_t p = tile.pair_begin; p < tile.pair_begin + tile.pair_count; ++p) {
      const ChosenRowLocation& row = plan.rows[p / group_size];
      EXPECT_EQ(row.batch, first.batch);
      EXPECT_EQ(row.shift, first.shift);
      for (int64_t c = 0; c < tile.row_count; ++c) {
        const int64_t difference = tile.k_position + tile.k_stride * c - row.position;
        if (difference < row.lower || difference > row.upper) continue;
        ++met[{row.target_row, tile.k, tile.row_begin + c}];
      }
    }
  }
  return met;
}

TEST(ProbabilityPlanTest, EveryVisiblePairIsInOneTile) {
  std::mt19937 random(5);
  int64_t met = 0;
  for (int i = 0; i < 300; ++i) {
    SCOPED_TRACE(i);
    Problem made;
    Fill(random, made);
    const int group_size = static_cast<int>(made.problem.num_heads / made.problem.num_kv_heads);
    const ProbabilityPlan plan = PlanProbabilities(made.call, random() % 2 ? 1 : 40);
    ASSERT_EQ(plan.rows.size(), made.call.rows.size());
    const Met walked = Walk(plan, group_size);
    EXPECT_EQ(walked, Expected(made.call, group_size));
    met += static_cast<int64_t>(walked.size());
  }
  EXPECT_GT(met, 10000);
}

// 64 rows at 64K tokens: tiles are full, nearby rows share a tile, and keys are split evenly.
TEST(ProbabilityPlanTest, ManyRowsShareTheirKeys) {
  Problem made;
  AttentionProblem& problem = made.problem;
  problem.num_heads = 32;
  problem.num_kv_heads = 8;
  problem.bands = {Band{.upper = 0}};
  ProbabilitiesCall& call = made.call;
  call.problem = &problem;
  call.q_rows = 65536;
  call.q_pieces = {Piece{.length = 65536}};
  call.blocks = {KvBlock{65536, call.q_pieces}};
  for (int64_t i = 0; i < 64; ++i) call.rows.push_back({0, (i * 37 % 64) * 1024 + 1023});
  const ProbabilityPlan plan = PlanProbabilities(call, 1056);
  EXPECT_EQ(plan.tile_pairs, kProbabilityPairs);
  int64_t keys = 0, most = 0;
  for (const ProbabilityTile& tile : plan.tiles) {
    EXPECT_EQ(tile.pair_count, 64);
    keys += tile.row_count;
    most = std::max<int64_t>(most, tile.row_count);
  }
  EXPECT_EQ(keys, (16 + 32 + 48 + 64) * 1024);  // of 4 x 65,536
  EXPECT_LE(most, 192);
  EXPECT_GE(plan.tiles.size(), 800u);
}

TEST(ProbabilityPlanTest, OneRowIsOfTheSmallKernel) {
  Problem made;
  AttentionProblem& problem = made.problem;
  problem.num_heads = 32;
  problem.num_kv_heads = 8;
  problem.bands = {Band{}};
  ProbabilitiesCall& call = made.call;
  call.problem = &problem;
  call.q_rows = 1;
  call.q_pieces = {Piece{.length = 1}};
  call.blocks = {KvBlock{1 << 20, {Piece{.length = 1 << 20}}}};
  call.rows = {{0, 0}};
  const ProbabilityPlan plan = PlanProbabilities(call, 1056);
  EXPECT_EQ(plan.tile_pairs, kFewProbabilityPairs);
  EXPECT_GE(plan.tiles.size(), 1000u);
  EXPECT_LE(plan.tiles.size(), 1056u + 1);
}

}  // namespace
}  // namespace ringattn::worker::cuda
