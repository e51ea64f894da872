#include "worker/kernels/cuda/tile_plan.h"

#include <cstdint>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

namespace ringattn::worker::cuda {
namespace {

using Pair = std::pair<int64_t, int64_t>;  // local q row, local key of the block

int64_t Ceil(int64_t a, int64_t b) { return a / b + (a % b > 0 ? 1 : 0); }
int64_t Floor(int64_t a, int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }

// The columns that a row sees, as the device computes them.
Pair RowLimits(const BandLimits& limits, int64_t row) {
  if (limits.same_stride) return {limits.first_lower + row, limits.first_upper + row};
  return {Ceil(limits.lower_base + limits.q_stride * row, limits.k_stride),
          Floor(limits.upper_base + limits.q_stride * row, limits.k_stride)};
}

struct Problem {
  AttentionProblem problem;
  std::vector<Piece> q_pieces;
  std::vector<Piece> k_pieces;
  int64_t q_rows = 0;
  int64_t k_rows = 0;
};

std::vector<Piece> RandomPieces(std::mt19937& random, int64_t documents, int64_t* rows) {
  std::vector<Piece> pieces;
  for (int count = 1 + random() % 4; count > 0; --count) {
    Piece piece;
    piece.local_begin = *rows;
    piece.length = random() % 70;
    piece.document = random() % documents;
    piece.position = random() % 90;
    piece.stride = 1 + random() % 3;
    *rows += piece.length;
    pieces.push_back(piece);
  }
  return pieces;
}

Problem RandomProblem(std::mt19937& random) {
  Problem p;
  const int64_t documents = 1 + random() % 2;
  for (int64_t d = 0; d < documents; ++d) {
    Band band;
    if (random() % 2) band.upper = static_cast<int64_t>(random() % 60) - 20;
    if (random() % 2) band.lower = static_cast<int64_t>(random() % 60) - 50;
    p.problem.bands.push_back(band);
  }
  p.q_pieces = RandomPieces(random, documents, &p.q_rows);
  p.k_pieces = RandomPieces(random, documents, &p.k_rows);
  return p;
}

std::set<Pair> VisiblePairs(const Problem& p) {
  std::set<Pair> pairs;
  for (const Piece& q : p.q_pieces) {
    for (const Piece& k : p.k_pieces) {
      if (q.document != k.document) continue;
      const Band& band = p.problem.bands[q.document];
      for (int64_t i = 0; i < q.length; ++i) {
        for (int64_t j = 0; j < k.length; ++j) {
          const int64_t difference = k.PositionOf(j) - q.PositionOf(i);
          if (difference >= band.lower && difference <= band.upper) {
            pairs.insert({q.local_begin + i, k.local_begin + j});
          }
        }
      }
    }
  }
  return pairs;
}

class TilePlanTest : public testing::TestWithParam<int> {};

TEST_P(TilePlanTest, ForwardTilesCoverEachVisiblePairOnce) {
  std::mt19937 random(GetParam());
  const Problem p = RandomProblem(random);
  ForwardCall call;
  call.problem = &p.problem;
  call.q_rows = p.q_rows;
  call.q_pieces = p.q_pieces;
  call.initial = true;
  KvBlock block;
  block.rows = p.k_rows;
  block.pieces = p.k_pieces;
  call.blocks = {block};
  ForwardTileShape shape;
  shape.q_rows = 16;
  shape.keys = 8;
  shape.target_blocks = random() % 2 ? 100 : 0;
  const ForwardPlan plan = PlanForwardTiles(call, shape);

  std::set<Pair> covered;
  std::set<int64_t> rows, slots;
  for (const ForwardTile& tile : plan.tiles) {
    if (tile.partial_slot >= 0) {
      EXPECT_TRUE(slots.insert(tile.partial_slot).second);
    } else {
      for (int64_t r = 0; r < tile.q_rows; ++r) {
        EXPECT_TRUE(rows.insert(tile.q_row_begin + r).second);
      }
    }
    for (int32_t i = tile.range_begin; i < tile.range_end; ++i) {
      const KvRange& range = plan.ranges[i];
      for (int64_t r = 0; r < tile.q_rows; ++r) {
        const Pair limits = RowLimits(range.limits, r);
        for (int64_t c = 0; c < range.row_count; ++c) {
          const bool seen = c >= limits.first && c <= limits.second;
          if (c >= range.full_begin && c < range.full_end) {
            EXPECT_TRUE(seen);
          }
          if (seen) {
            EXPECT_TRUE(covered.insert({tile.q_row_begin + r, range.row_begin + c}).second);
          }
        }
      }
    }
  }
  for (const CombineTile& combine : plan.combines) {
    for (int64_t r = 0; r < combine.q_rows; ++r) {
      EXPECT_TRUE(rows.insert(combine.q_row_begin + r).second);
    }
  }
  EXPECT_EQ(covered, VisiblePairs(p));
  EXPECT_EQ(static_cast<int64_t>(rows.size()), p.q_rows);
  EXPECT_EQ(static_cast<int64_t>(slots.size()), plan.slots);
}

TEST_P(TilePlanTest, BackwardTilesCoverEachVisiblePairOnce) {
  std::mt19937 random(GetParam());
  const Problem p = RandomProblem(random);
  BackwardCall call;
  call.problem = &p.problem;
  call.q_rows = p.q_rows;
  call.q_pieces = p.q_pieces;
  KvBlock block;
  block.rows = p.k_rows;
  block.pieces = p.k_pieces;
  call.blocks = {block};
  const int32_t keys = 16;
  const BackwardPlan plan = PlanBackwardTiles(call, keys);

  std::set<Pair> covered;
  for (const BackwardTile& tile : plan.tiles) {
    for (int32_t i = tile.range_begin; i < tile.range_end; ++i) {
      const QRange& range = plan.ranges[i];
      for (int64_t r = 0; r < range.row_count; ++r) {
        const Pair limits = RowLimits(range.limits, r);
        for (int64_t c = 0; c < keys; ++c) {
          const bool seen = c >= limits.first && c <= limits.second && c < tile.rows;
          if (r >= range.full_begin && r < range.full_end) {
            EXPECT_TRUE(seen);
          }
          if (seen) {
            EXPECT_TRUE(covered.insert({range.row_begin + r, tile.row_begin + c}).second);
          }
        }
      }
    }
  }
  EXPECT_EQ(covered, VisiblePairs(p));
}

INSTANTIATE_TEST_SUITE_P(Seeds, TilePlanTest, testing::Range(0, 300));

// Ranges name their piece, counted through all blocks, empty pieces included.
TEST(TilePlanRangesTest, NameTheirPiece) {
  AttentionProblem problem;
  problem.bands = {Band{}, Band{}};
  ForwardCall call;
  call.problem = &problem;
  call.q_rows = 10;
  call.q_pieces = {Piece{0, 10, 1, 0, 1}};
  KvBlock first, second;
  first.rows = 8;
  first.pieces = {Piece{0, 4, 0, 0, 1}, Piece{4, 0, 1, 0, 1}, Piece{4, 4, 1, 0, 1}};
  second.rows = 4;
  second.pieces = {Piece{0, 4, 1, 4, 1}};
  call.blocks = {first, second};
  ForwardTileShape shape;
  shape.q_rows = 64;
  shape.keys = 64;
  const ForwardPlan plan = PlanForwardTiles(call, shape);
  ASSERT_EQ(plan.ranges.size(), 2u);
  EXPECT_EQ(plan.ranges[0].piece, 2);
  EXPECT_EQ(plan.ranges[1].piece, 3);
}

}  // namespace
}  // namespace ringattn::worker::cuda
