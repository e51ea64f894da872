#include "worker/kernels/cuda/sm90/launch/ordered_backward.h"

#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace ringattn::worker::cuda::sm90 {
namespace {

constexpr int32_t kTileKeys = 128;
constexpr int32_t kTileRows = 64;
constexpr int64_t kFar = std::numeric_limits<int32_t>::max();

// Documents of random lengths in pieces of q and of two blocks, with one band for each.
struct Request {
  explicit Request(uint32_t seed) {
    std::mt19937 random(seed);
    const auto pick = [&random](int64_t below) { return static_cast<int64_t>(random() % below); };
    const int64_t documents = 1 + pick(3);
    blocks.resize(2);
    for (int64_t document = 0; document < documents; ++document) {
      Band band;
      band.upper = pick(2) == 0 ? 0 : pick(2) == 0 ? pick(300) : kFar;
      band.lower = pick(2) == 0 ? -pick(700) : -kFar;
      problem.bands.push_back(band);
      for (int64_t i = 0, begin = 0; i <= pick(3); ++i) {
        const int64_t length = pick(900);
        call.q_pieces.push_back({call.q_rows, length, document, begin, 1});
        call.q_rows += length;
        begin += length + pick(400);
      }
      for (KvBlock& block : blocks) {
        const int64_t length = pick(1200);
        block.pieces.push_back({block.rows, length, document, pick(600), 1});
        block.rows += length;
      }
    }
    call.problem = &problem;
    call.blocks = blocks;
  }
  AttentionProblem problem;
  std::vector<KvBlock> blocks;
  BackwardCall call;
};

class TurnsTest : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Seeds, TurnsTest, testing::Range(0, 200));

// Simulates the kernel's lanes, tile after tile in the table's order and then in the opposite
// order. Each tile finds its predecessor's number in the counter.
TEST_P(TurnsTest, EveryTileFindsItsPredecessor) {
  const Request request(GetParam());
  BackwardPlan plan = PlanBackwardTiles(request.call, kTileKeys, kTileRows);
  const BackwardTurns turns = TakeTurns(request.call.q_pieces, kTileRows, plan);
  ASSERT_EQ(turns.ranges.size(), plan.ranges.size());
  for (const bool turned : {false, true}) {
    std::vector<int32_t> counters(turns.query_tiles, 0);
    const int32_t tiles = static_cast<int32_t>(plan.tiles.size());
    for (int32_t i = 0; i < tiles; ++i) {
      const int32_t number = turned ? tiles - 1 - i : i;
      const BackwardTile& tile = plan.tiles[number];
      for (int32_t index = tile.range_begin; index < tile.range_end; ++index) {
        const QTurn& turn = turns.ranges[index];
        for (int32_t row = 0; row < plan.ranges[index].row_count; row += kTileRows) {
          int32_t& counter = counters.at(turn.first_tile + row / kTileRows);
          EXPECT_EQ(counter, turned ? turn.after_turned : turn.after);
          counter = number + 1;
        }
      }
    }
  }
}

// The same rows see the same keys as without splitting, and no two q tiles share rows.
TEST_P(TurnsTest, CutRangesAreTheWhole) {
  const Request request(GetParam());
  const BackwardPlan whole = PlanBackwardTiles(request.call, kTileKeys, kTileRows);
  BackwardPlan plan = whole;
  const BackwardTurns turns = TakeTurns(request.call.q_pieces, kTileRows, plan);
  std::map<int32_t, std::pair<int32_t, int64_t>> places;  // of q tiles: piece and first row
  for (size_t i = 0; i < plan.tiles.size(); ++i) {
    std::vector<QRange> expected, actual;  // rows one by one
    for (int32_t r = whole.tiles[i].range_begin; r < whole.tiles[i].range_end; ++r) {
      const QRange& range = whole.ranges[r];
      for (int32_t row = 0; row < range.row_count; ++row) {
        expected.push_back(RowsOf(range, row, 1));
      }
    }
    for (int32_t r = plan.tiles[i].range_begin; r < plan.tiles[i].range_end; ++r) {
      const QRange& range = plan.ranges[r];
      for (int32_t row = 0; row < range.row_count; ++row) actual.push_back(RowsOf(range, row, 1));
      for (int32_t row = 0; row < range.row_count; row += kTileRows) {
        const int32_t tile = turns.ranges[r].first_tile + row / kTileRows;
        const auto [place, fresh] = places.insert({tile, {range.piece, range.row_begin + row}});
        EXPECT_EQ(place->second, std::pair(range.piece, range.row_begin + row));
      }
    }
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t row = 0; row < actual.size(); ++row) {
      EXPECT_EQ(std::memcmp(&actual[row], &expected[row], sizeof(QRange)), 0);
    }
  }
}

// Each pair occurs once, at its q tile, by ascending key tiles.
TEST_P(TurnsTest, VisitsAreAllPairs) {
  const Request request(GetParam());
  BackwardPlan plan = PlanBackwardTiles(request.call, kTileKeys, kTileRows);
  const BackwardTurns turns = TakeTurns(request.call.q_pieces, kTileRows, plan);
  const QueryVisits found = VisitsOf(plan, turns, kTileRows);
  ASSERT_EQ(found.begins.size(), turns.query_tiles + 1u);
  ASSERT_EQ(found.begins.back(), static_cast<int32_t>(found.visits.size()));
  std::map<int32_t, std::pair<int32_t, int32_t>> by_pair;  // q tile, key tile
  for (int32_t q_tile = 0; q_tile < turns.query_tiles; ++q_tile) {
    int32_t last = -1;
    for (int32_t i = found.begins[q_tile]; i < found.begins[q_tile + 1]; ++i) {
      const QVisit& visit = found.visits[i];
      EXPECT_GT(visit.number, last);
      last = visit.number;
      EXPECT_TRUE(by_pair.insert({visit.pair, {q_tile, visit.number}}).second);
    }
  }
  std::map<int32_t, std::pair<int32_t, int32_t>> expected;
  std::vector<int32_t> range_begin(plan.ranges.size());  // its first pair
  int32_t pair = 0;
  for (size_t r = 0; r < plan.ranges.size(); ++r) {
    range_begin[r] = pair;
    pair += (plan.ranges[r].row_count + kTileRows - 1) / kTileRows;
  }
  for (size_t number = 0; number < plan.tiles.size(); ++number) {
    const BackwardTile& tile = plan.tiles[number];
    for (int32_t r = tile.range_begin; r < tile.range_end; ++r) {
      for (int32_t i = 0; i * kTileRows < plan.ranges[r].row_count; ++i) {
        expected[range_begin[r] + i] = {turns.ranges[r].first_tile + i,
                                        static_cast<int32_t>(number)};
      }
    }
  }
  EXPECT_EQ(by_pair, expected);
}

// One causal document. The expectations hold for every tile except the first and last.
TEST(CausalTurnsTest, ACausalMaskCutsNothing) {
  Request request(0);
  request.problem.bands = {Band{-kFar, 0}};
  const int64_t n = 10 * kTileKeys;
  request.call.q_pieces = {{0, n, 0, 0, 1}};
  request.call.q_rows = n;
  request.call.blocks.resize(1);
  request.call.blocks[0].rows = n;
  request.call.blocks[0].pieces = request.call.q_pieces;
  BackwardPlan plan = PlanBackwardTiles(request.call, kTileKeys, kTileRows);
  const BackwardTurns turns = TakeTurns(request.call.q_pieces, kTileRows, plan);
  EXPECT_EQ(turns.query_tiles, n / kTileRows);
  for (int32_t i = 0; i < 10; ++i) {
    const BackwardTile& tile = plan.tiles[i];
    EXPECT_EQ(tile.row_begin, i * kTileKeys);  // longest first
    // In the opposite order a tile is the first one only at its two diagonal q tiles.
    EXPECT_EQ(tile.range_end - tile.range_begin, i == 9 ? 1 : 2);
    EXPECT_EQ(turns.ranges[tile.range_begin].after, i);
    EXPECT_EQ(turns.ranges[tile.range_begin].after_turned, 0);
    EXPECT_EQ(turns.ranges[tile.range_end - 1].after_turned, i == 9 ? 0 : i + 2);
  }
}

// Counters: tickets, two for each q tile of each head, and those for dk and dv if packs share them.
TEST(CallTurnsTest, ScratchHoldsTheCounters) {
  const Request request(1);
  BackwardKernelParams params;
  params.common.batch = 2;
  params.common.num_heads = 8;
  params.common.num_kv_heads = 2;
  params.common.group_size = 4;
  params.packs = 4;
  for (const int32_t heads_per_block : {4, 2}) {
    BackwardPlan plan = PlanBackwardTiles(request.call, kTileKeys, kTileRows);
    params.tile_count = static_cast<int32_t>(plan.tiles.size());
    params.heads_per_block = heads_per_block;
    CallTurns turns;
    EXPECT_FALSE(turns.any());
    ASSERT_TRUE(turns.Init(request.call, kTileRows, params, plan).ok());
    EXPECT_TRUE(turns.any());
    EXPECT_EQ(turns.table_bytes() % 256, 0);
    EXPECT_GE(turns.table_bytes(), static_cast<int64_t>(plan.ranges.size() * sizeof(QTurn)));
    BackwardPlan again = PlanBackwardTiles(request.call, kTileKeys, kTileRows);
    const int64_t queries = TakeTurns(request.call.q_pieces, kTileRows, again).query_tiles;
    const auto up = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
    EXPECT_EQ(turns.scratch_bytes(),
              256 + up(2 * 8 * queries * 8) +
                  (heads_per_block == 4 ? 0 : up(2 * 2 * int64_t{params.tile_count} * 8)));
  }
}

}  // namespace
}  // namespace ringattn::worker::cuda::sm90
