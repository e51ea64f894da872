#include "worker/kernels/cuda/plan/term_table.h"

#include <cstdint>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace ringattn::worker::cuda {
namespace {

struct Place {
  int64_t document = -1;
  int64_t position = -1;

  bool operator==(const Place&) const = default;
};

std::vector<Piece> RandomPieces(std::mt19937& random, int64_t* rows) {
  std::vector<Piece> pieces;
  for (int count = 1 + random() % 4; count > 0; --count) {
    Piece piece;
    piece.local_begin = *rows;
    piece.length = random() % 3 == 0 ? 0 : random() % 90;
    piece.document = random() % 2;
    piece.position = random() % 500;
    piece.stride = 1 + random() % 3;
    *rows += piece.length;
    pieces.push_back(piece);
  }
  return pieces;
}

std::vector<Place> PlacesOf(const std::vector<Piece>& pieces, int64_t rows) {
  std::vector<Place> places(rows);
  for (const Piece& piece : pieces) {
    for (int64_t r = 0; r < piece.length; ++r) {
      places[piece.local_begin + r] = {piece.document, piece.PositionOf(r)};
    }
  }
  return places;
}

// Random pieces of two documents, and two blocks of keys with separate segment ids.
struct Problem {
  explicit Problem(uint32_t seed, bool by_keys = false) {
    problem.terms.by_keys = by_keys;
    std::mt19937 random(seed);
    problem.bands = {Band{.upper = 300}, Band{.lower = -400}};
    problem.terms.shifts = {5, -7};
    q_pieces = RandomPieces(random, &q_rows);
    for (int32_t& ids : block_ids) {
      KvBlock block;
      block.pieces = RandomPieces(random, &block.rows);
      block.segment_ids = &ids;
      block.k = &ids;  // distinguishes the ranges of blocks
      blocks.push_back(block);
    }
  }

  const KvBlock& BlockOf(const void* k) const { return blocks[k == blocks[0].k ? 0 : 1]; }

  // Verifies the table's positions of rows [q_row, q_row + count) and of keys from k_row on.
  void Check(const TermRange& term, const BandLimits& limits, int64_t q_row, int64_t q_count,
             const KvBlock& block, int64_t k_row, int64_t k_count) const {
    const std::vector<Place> queries = PlacesOf(q_pieces, q_rows);
    const std::vector<Place> keys = PlacesOf(block.pieces, block.rows);
    const bool by_keys = problem.terms.by_keys;
    EXPECT_EQ(term.segment_ids, block.segment_ids);
    EXPECT_EQ(term.shift, problem.terms.shifts[term.document]);
    for (int64_t r = 0; r < q_count; ++r) {
      EXPECT_EQ((Place{term.document, term.q_position + limits.q_stride * r}), queries[q_row + r]);
      EXPECT_EQ(term.plane_row + (by_keys ? limits.q_stride : 1) * r,
                by_keys ? queries[q_row + r].position : q_row + r);
    }
    for (int64_t c = 0; c < k_count; ++c) {
      EXPECT_EQ((Place{term.document, term.k_position + limits.k_stride * c}), keys[k_row + c]);
      EXPECT_EQ(term.plane_column + (by_keys ? 1 : limits.k_stride) * c,
                by_keys ? k_row + c : keys[k_row + c].position);
    }
  }

  AttentionProblem problem;
  std::vector<Piece> q_pieces;
  int64_t q_rows = 0;
  std::vector<KvBlock> blocks;
  int32_t block_ids[2] = {};
};

class TermTableTest : public testing::TestWithParam<int> {};

TEST_P(TermTableTest, ForwardRangesKnowTheirPositions) {
  const Problem p(GetParam(), /*by_keys=*/GetParam() % 2 == 1);
  ForwardCall call;
  call.problem = &p.problem;
  call.q_rows = p.q_rows;
  call.q_pieces = p.q_pieces;
  call.blocks = p.blocks;
  // Without and with split keys.
  for (const int64_t target : {0, 1000}) {
    const ForwardPlan plan = PlanForwardTiles(call, {32, 16, target, 1});
    const std::vector<TermRange> terms = TermRangesOf(call, plan);
    ASSERT_EQ(terms.size(), plan.ranges.size());
    for (const ForwardTile& tile : plan.tiles) {
      for (int32_t i = tile.range_begin; i < tile.range_end; ++i) {
        const KvRange& range = plan.ranges[i];
        p.Check(terms[i], range.limits, tile.q_row_begin, tile.q_rows, p.BlockOf(range.k),
                range.row_begin, range.row_count);
      }
    }
  }
}

TEST_P(TermTableTest, BackwardRangesKnowTheirPositions) {
  const Problem p(GetParam(), /*by_keys=*/GetParam() % 2 == 1);
  BackwardCall call;
  call.problem = &p.problem;
  call.q_rows = p.q_rows;
  call.q_pieces = p.q_pieces;
  call.blocks = p.blocks;
  const BackwardPlan plan = PlanBackwardTiles(call, 16);
  const std::vector<TermRange> terms = TermRangesOf(call, plan);
  ASSERT_EQ(terms.size(), plan.ranges.size());
  for (const BackwardTile& tile : plan.tiles) {
    for (int32_t i = tile.range_begin; i < tile.range_end; ++i) {
      const QRange& range = plan.ranges[i];
      p.Check(terms[i], range.limits, range.row_begin, range.row_count, p.BlockOf(tile.k),
              tile.row_begin, tile.rows);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Random, TermTableTest, testing::Range(0, 100));

TEST(TermTableTest, PlanesHaveTheRowsOfWhatIsNotCut) {
  AttentionProblem problem;
  problem.terms.bias = BiasForm{};
  problem.terms.rows = 70;
  problem.terms.columns = 50;
  EXPECT_EQ(TermsOf(problem, {}, 20).plane_rows, 20);
  EXPECT_FALSE(TermsOf(problem, {}, 20).by_keys);
  problem.terms.by_keys = true;
  EXPECT_EQ(TermsOf(problem, {}, 20).plane_rows, 70);
  EXPECT_TRUE(TermsOf(problem, {}, 20).by_keys);
}

TEST(TermTableTest, AProblemWithoutTermsHasNoShifts) {
  Problem p(3);
  p.problem.terms.shifts.clear();
  BackwardCall call;
  call.problem = &p.problem;
  call.q_rows = p.q_rows;
  call.q_pieces = p.q_pieces;
  call.blocks = p.blocks;
  for (const TermRange& range : TermRangesOf(call, PlanBackwardTiles(call, 16))) {
    EXPECT_EQ(range.shift, 0);
  }
}

}  // namespace
}  // namespace ringattn::worker::cuda
