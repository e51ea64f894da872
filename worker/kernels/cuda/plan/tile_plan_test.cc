#include "worker/kernels/cuda/plan/tile_plan.h"

#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

namespace ringattn::worker::cuda {
namespace {

using Pair = std::pair<int64_t, int64_t>;  // local q row, local key of the block

int64_t Ceil(int64_t a, int64_t b) { return a / b + (a % b > 0 ? 1 : 0); }
int64_t Floor(int64_t a, int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }

// Returns the columns that a row sees, computed as on the device.
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
  shape.blocks_at_once = random() % 4;
  shape.fills_last_wave = random() % 2 == 0;
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

// Each range stores the index of its piece over all blocks, including empty pieces.
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

// 64 queries that see 32 keys of their rank and 32 late keys after them, in tiles of 16 by 8.
struct LateRequest {
  LateRequest() {
    problem.bands = {Band{}};
    call.problem = &problem;
    call.q_rows = 64;
    call.q_pieces = {Piece{0, 64, 0, 0, 1}};
    KvBlock own, late;
    own.rows = late.rows = 32;
    own.pieces = {Piece{0, 32, 0, 0, 1}};
    late.pieces = {Piece{0, 32, 0, 32, 1}};
    late.late = 1;
    call.blocks = {own, late};
    call.initial = call.final = true;
    shape.q_rows = 16;
    shape.keys = 8;
  }
  // Lists each tile in the plan's order: its first row, the slot of its split, and the pieces of
  // its ranges.
  std::vector<std::string> Tiles() const {
    const ForwardPlan plan = PlanForwardTiles(call, shape);
    std::vector<std::string> tiles;
    for (const ForwardTile& tile : plan.tiles) {
      std::string line =
          std::to_string(tile.q_row_begin) + (tile.partial_slot < 0 ? ":" : " part:");
      for (int32_t r = tile.range_begin; r < tile.range_end; ++r) {
        line += " " + std::to_string(plan.ranges[r].piece);
      }
      tiles.push_back(line);
    }
    EXPECT_EQ(plan.slots, 2 * static_cast<int64_t>(plan.combines.size()));
    return tiles;
  }
  AttentionProblem problem;
  ForwardCall call;
  ForwardTileShape shape;
};

using Lines = std::vector<std::string>;

// A kernel begins with a tile's last range.
TEST(TilePlanLateKeysTest, LateKeysAreReadLast) {
  EXPECT_EQ(LateRequest().Tiles(), (Lines{"0: 1 0", "16: 1 0", "32: 1 0", "48: 1 0"}));
}

TEST(TilePlanLateKeysTest, TilesAreSplitUntilThereIsEnoughToDoBefore) {
  LateRequest request;
  request.shape.early_key_tiles = {6};  // each tile has 4 without late keys
  EXPECT_EQ(request.Tiles(),
            (Lines{"0 part: 0", "16 part: 0", "32: 1 0", "48: 1 0", "0 part: 1", "16 part: 1"}));
}

// Every tile begins with the keys that are not late. The tiles that run at the same time cover the
// wait together and stay unsplit.
TEST(TilePlanLateKeysTest, OwnKeysOfTheFirstTilesBridgeTheWaitToo) {
  LateRequest request;
  request.shape.early_key_tiles = {6};
  request.shape.blocks_at_once = 1;  // its tile has 4 without late keys
  EXPECT_EQ(request.Tiles(), (Lines{"16 part: 0", "0: 1 0", "32: 1 0", "48: 1 0", "16 part: 1"}));
  request.shape.blocks_at_once = 2;
  EXPECT_EQ(request.Tiles(), (Lines{"0: 1 0", "16: 1 0", "32: 1 0", "48: 1 0"}));
  // With four heads a tile is four blocks, of which two run at a time.
  request.shape.blocks_per_tile = 4;
  EXPECT_EQ(request.Tiles(), (Lines{"16 part: 0", "0: 1 0", "32: 1 0", "48: 1 0", "16 part: 1"}));
}

// Under a causal mask the first rows see none of the late keys. Their tiles come first although
// they are short, and if they suffice no tile is split.
TEST(TilePlanLateKeysTest, TilesThatSeeNoLateKeysComeFirst) {
  LateRequest request;
  request.problem.bands = {Band{.upper = 0}};
  EXPECT_EQ(request.Tiles(), (Lines{"48: 1 0", "32: 1 0", "16: 0", "0: 0"}));
  request.shape.early_key_tiles = {5};  // the two tiles have 4 and 2
  EXPECT_EQ(request.Tiles(), (Lines{"16: 0", "0: 0", "48: 1 0", "32: 1 0"}));
  request.shape.early_key_tiles = {7};
  EXPECT_EQ(request.Tiles(), (Lines{"16: 0", "32 part: 0", "0: 0", "48: 1 0", "32 part: 1"}));
}

// Keys of a second arrival come after those of the first, and the first tiles bridge the wait for
// them with both other kinds.
TEST(TilePlanLateKeysTest, KeysAreReadInTheOrderOfTheirArrivals) {
  LateRequest request;
  KvBlock last = request.call.blocks[1];
  last.pieces[0].position = 64;
  last.late = 2;
  request.call.blocks.push_back(last);
  request.shape.blocks_at_once = 1;
  const Lines unsplit = {"0: 2 1 0", "16: 2 1 0", "32: 2 1 0", "48: 2 1 0"};
  request.shape.early_key_tiles = {4, 8};  // a tile has 4 before the first arrival and 8 before the
                                           // second
  EXPECT_EQ(request.Tiles(), unsplit);
  const Lines split = {"16 part: 0", "0: 2 1 0", "32: 2 1 0", "48: 2 1 0", "16 part: 2 1"};
  request.shape.early_key_tiles = {4, 9};
  EXPECT_EQ(request.Tiles(), split);
  request.shape.early_key_tiles = {5, 8};
  EXPECT_EQ(request.Tiles(), split);
}

// Keys that are split because there are too few blocks are not split again.
TEST(TilePlanLateKeysTest, SplitKeysStayAsTheyAre) {
  LateRequest request;
  request.shape.target_blocks = 8;
  const Lines split = request.Tiles();
  request.shape.early_key_tiles = {6};
  EXPECT_EQ(request.Tiles(), split);
}

// Nine equal tiles on four multiprocessors: the tile that would run alone is split in four.
TEST(TilePlanWavesTest, AShortLastWaveIsSplit) {
  AttentionProblem problem;
  problem.bands = {Band{}};
  ForwardCall call;
  call.problem = &problem;
  call.q_rows = 9 * 16;
  call.q_pieces = {Piece{0, 9 * 16, 0, 0, 1}};
  KvBlock block;
  block.rows = 16 * 8;
  block.pieces = {Piece{0, 16 * 8, 0, 0, 1}};
  call.blocks = {block};
  call.initial = call.final = true;
  ForwardTileShape shape;
  shape.q_rows = 16;
  shape.keys = 8;
  shape.blocks_at_once = 4;
  EXPECT_EQ(PlanForwardTiles(call, shape).slots, 0);
  shape.fills_last_wave = true;
  const ForwardPlan plan = PlanForwardTiles(call, shape);
  EXPECT_EQ(plan.tiles.size(), 8u + 4u);
  EXPECT_EQ(plan.slots, 4);
  ASSERT_EQ(plan.combines.size(), 1u);
  EXPECT_EQ(plan.combines[0].q_row_begin, 8 * 16);
  for (int i = 0; i < 8; ++i)
    EXPECT_LT(plan.tiles[i].partial_slot, 0) << "unsplit tiles come first";
  // No split if the last wave is nearly full, if tiles differ, or if the splits would be too short.
  shape.blocks_at_once = 5;
  EXPECT_EQ(PlanForwardTiles(call, shape).slots, 0);
  call.q_rows = 10 * 16;
  call.q_pieces[0].length = 10 * 16;
  EXPECT_EQ(PlanForwardTiles(call, shape).slots, 0);
  shape.blocks_at_once = 4;
  problem.bands[0].upper = 0;
  EXPECT_EQ(PlanForwardTiles(call, shape).slots, 0);
  problem.bands[0] = Band{};
  shape.keys = 16;
  EXPECT_EQ(PlanForwardTiles(call, shape).slots, 0);
}

}  // namespace
}  // namespace ringattn::worker::cuda
