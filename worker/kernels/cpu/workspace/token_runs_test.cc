#include "worker/kernels/cpu/workspace/token_runs.h"

#include <random>

#include "gtest/gtest.h"

namespace ringattn::worker::cpu {
namespace {

TEST(TokenRunsTest, JoinsPiecesWhosePositionsIncrease) {
  TokenRuns runs;
  runs.Add({{0, 4, 0, 10, 1}, {4, 0, 0, 0, 1}, {4, 3, 0, 20, 2}}, 0);
  ASSERT_EQ(runs.runs().size(), 1u);
  EXPECT_EQ(runs.runs()[0].length, 7);
  const TokenRun& run = runs.runs()[0];
  const int64_t positions[] = {10, 11, 12, 13, 20, 22, 24};
  for (int64_t r = 0; r < 7; ++r) EXPECT_EQ(runs.PositionOf(run, r), positions[r]);
  EXPECT_EQ(runs.RowsAt(run, 13, 21).begin, 3);
  EXPECT_EQ(runs.RowsAt(run, 13, 21).end, 5);
  EXPECT_TRUE(runs.RowsAt(run, 14, 19).empty());
  EXPECT_TRUE(runs.RowsAt(run, 25, 30).empty());
  EXPECT_EQ(runs.RowsAt(run, -kUnboundedBand, kUnboundedBand).size(), 7);
}

TEST(TokenRunsTest, StartsANewRunWhereItMust) {
  TokenRuns runs;
  runs.Add({{0, 4, 1, 10, 1},     // document 1
            {4, 4, 1, 2, 1},      // positions go back
            {8, 4, 0, 0, 1},      // another document
            {13, 4, 0, 100, 1}},  // a hole in memory
           0);
  runs.Add({{17, 4, 0, 200, 1}}, 1);  // another buffer
  EXPECT_EQ(runs.runs().size(), 5u);
  runs.SortByDocument();
  EXPECT_EQ(runs.RunsOf(0).size(), 3);
  EXPECT_EQ(runs.RunsOf(1).begin, 3);
  EXPECT_EQ(runs.RunsOf(1).end, 5);
  EXPECT_TRUE(runs.RunsOf(2).empty());
  EXPECT_EQ(runs.runs()[2].block, 1);
}

// A run answers as band.h does piece by piece.
TEST(TokenRunsTest, AgreesWithBandArithmetic) {
  std::mt19937 random(11);
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<Piece> pieces;
    int64_t local = 0;
    int64_t position = draw(0, 5);
    for (int p = 0; p < 5; ++p) {
      pieces.push_back({local, draw(1, 6), 0, position, draw(1, 4)});
      local += pieces.back().length;
      position = pieces.back().PositionOf(pieces.back().length - 1) + draw(1, 5);
    }
    TokenRuns runs;
    runs.Add(pieces, 0);
    ASSERT_EQ(runs.runs().size(), 1u);
    const Band band{draw(-20, 5), draw(-5, 20)};
    const Piece query{0, 1, 0, draw(0, 60), 1};
    const RowRange together =
        runs.RowsAt(runs.runs()[0], query.position + band.lower, query.position + band.upper);
    int64_t seen = 0;
    for (const Piece& piece : pieces) {
      const RowRange keys = KeysOfRow(query, 0, piece, band);
      seen += keys.size();
      if (keys.empty()) continue;
      EXPECT_LE(together.begin, piece.local_begin + keys.begin);
      EXPECT_GE(together.end, piece.local_begin + keys.end);
    }
    EXPECT_EQ(together.size(), seen);
  }
}

}  // namespace
}  // namespace ringattn::worker::cpu
