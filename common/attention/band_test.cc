#include "common/attention/band.h"

#include <algorithm>
#include <limits>
#include <random>

#include "gtest/gtest.h"

namespace ringattn {
namespace {

bool Sees(const Piece& q, int64_t q_row, const Piece& kv, int64_t kv_row, const Band& band) {
  const int64_t difference = kv.PositionOf(kv_row) - q.PositionOf(q_row);
  return q.document == kv.document && band.lower <= difference && difference <= band.upper;
}

// Widens `range` by `index`.
void Include(RowRange& range, int64_t index) {
  range = range.empty() ? RowRange{index, index + 1}
                        : RowRange{std::min(range.begin, index), std::max(range.end, index + 1)};
}

void ExpectSame(const RowRange& actual, const RowRange& expected) {
  EXPECT_EQ(actual.begin, expected.begin);
  EXPECT_EQ(actual.end, expected.end);
}

class RandomCases {
 public:
  explicit RandomCases(int seed) : random_(seed) {}

  int64_t Draw(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }
  Piece DrawPiece() {
    const int64_t stride = Draw(0, 2) == 0 ? Draw(1, 12) : Draw(1, 2);
    return {Draw(0, 5), Draw(1, 14), Draw(0, 9) == 0 ? 1 : 0, Draw(0, 40), stride};
  }
  Band DrawBand() {
    Band band;
    if (Draw(0, 3) != 0) band.lower = Draw(-45, 45);
    if (Draw(0, 3) != 0) {
      band.upper = band.lower == -kUnboundedBand ? Draw(-45, 45) : band.lower + Draw(0, 20);
    }
    return band;
  }

 private:
  std::mt19937 random_;
};

TEST(BandTest, RangesEqualBruteForce) {
  RandomCases cases(1);
  for (int round = 0; round < 100000; ++round) {
    const Piece q = cases.DrawPiece();
    const Piece kv = cases.DrawPiece();
    const Band band = cases.DrawBand();
    const int64_t q_begin = cases.Draw(0, q.length - 1);
    const int64_t q_end = cases.Draw(q_begin + 1, q.length);
    const int64_t kv_begin = cases.Draw(0, kv.length - 1);
    const int64_t kv_end = cases.Draw(kv_begin + 1, kv.length);

    RowRange of_row, reachable, visible, reaching;
    for (int64_t c = 0; c < kv.length; ++c) {
      bool by_all = true;
      for (int64_t r = 0; r < q.length; ++r) {
        const bool sees = Sees(q, r, kv, c, band);
        const bool in_rows = q_begin <= r && r < q_end;
        if (sees && r == q_begin) Include(of_row, c);
        if (sees && in_rows) Include(reachable, c);
        if (!sees && in_rows) by_all = false;
        if (sees && kv_begin <= c && c < kv_end) Include(reaching, r);
      }
      if (by_all) Include(visible, c);
    }
    ExpectSame(KeysOfRow(q, q_begin, kv, band), of_row);
    ExpectSame(ReachableKeys(q, q_begin, q_end, kv, band), reachable);
    ExpectSame(FullyVisibleKeys(q, q_begin, q_end, kv, band), visible);
    ExpectSame(ReachingQueries(q, kv, kv_begin, kv_end, band), reaching);
    if (HasFailure()) FAIL() << "round " << round;
  }
}

TEST(BandTest, EmptyRangesOfRows) {
  const Piece piece{0, 10, 0, 0, 1};
  ExpectSame(ReachableKeys(piece, 3, 3, piece, Band{}), {});
  ExpectSame(FullyVisibleKeys(piece, 3, 3, piece, Band{}), {});
  ExpectSame(ReachingQueries(piece, piece, 3, 3, Band{}), {});
}

TEST(BandTest, UnboundedAtTheLongestPositions) {
  constexpr int64_t kFar = int64_t{1} << 40;
  const Piece q{0, kFar, 0, kFar, 64};
  const Piece kv{0, kFar, 0, 0, 64};
  ExpectSame(KeysOfRow(q, kFar - 1, kv, Band{}), {0, kFar});
  ExpectSame(ReachableKeys(q, 0, kFar, kv, Band{}), {0, kFar});
  ExpectSame(FullyVisibleKeys(q, 0, kFar, kv, Band{}), {0, kFar});
  ExpectSame(ReachingQueries(q, kv, 0, kFar, Band{-kUnboundedBand, 0}), {0, kFar});
  ExpectSame(ReachingQueries(q, kv, kFar - 1, kFar, Band{-kUnboundedBand, 0}),
             {kFar - 1 - kFar / 64, kFar});
}

// Compares with the definitions of the masks, with i and j counted within the document.
TEST(BandTest, DocumentBandIsTheMask) {
  for (int64_t sq : {0, 1, 3, 7}) {
    for (int64_t sk : {0, 1, 4, 7, 9}) {
      for (bool causal : {false, true}) {
        for (int64_t left : {-1, 0, 2, 100}) {
          for (int64_t right : {-1, 0, 1, 100}) {
            AttentionOptions options;
            options.causal = causal;
            options.window_left = left;
            options.window_right = right;
            const Band band = DocumentBand(options, sq, sk);
            for (int64_t i = 0; i < sq; ++i) {
              for (int64_t j = 0; j < sk; ++j) {
                const int64_t aligned = i + sk - sq;
                const bool allowed = (!causal || j <= aligned) &&
                                     (left < 0 || aligned - left <= j) &&
                                     (right < 0 || j <= aligned + right);
                EXPECT_EQ(band.lower <= j - i && j - i <= band.upper, allowed);
              }
            }
          }
        }
      }
    }
  }
}

TEST(BandTest, EnormousWindowsAreUnlimited) {
  AttentionOptions options;
  options.window_left = std::numeric_limits<int64_t>::max();
  options.window_right = std::numeric_limits<int64_t>::max();
  const Band band = DocumentBand(options, 5, 9);
  EXPECT_EQ(band.lower, -kUnboundedBand);
  EXPECT_EQ(band.upper, kUnboundedBand);
}

TEST(BandTest, OneBandPerDocument) {
  AttentionSpec spec;
  spec.options.causal = true;
  spec.shape.cu_seqlens_q = {0, 4, 4, 10};
  spec.shape.cu_seqlens_k = {0, 6, 9, 10};
  const std::vector<Band> bands = DocumentBands(spec);
  ASSERT_EQ(bands.size(), 3u);
  EXPECT_EQ(bands[0].upper, 2);
  EXPECT_EQ(bands[1].upper, 3);
  EXPECT_EQ(bands[2].upper, -5);
}

}  // namespace
}  // namespace ringattn
