#include "common/schedule/route/work_count.h"

#include <algorithm>
#include <random>

#include "gtest/gtest.h"

namespace ringattn {
namespace {

std::vector<Piece> DrawPieces(std::mt19937& random, int count, int64_t max_length) {
  std::vector<Piece> pieces;
  int64_t local_begin = 0;
  int64_t free_from[] = {0, 0, 0};
  const auto draw = [&](int64_t count) { return static_cast<int64_t>(random() % count); };
  std::vector<int64_t> documents;
  for (int i = 0; i < count; ++i) documents.push_back(draw(3));
  std::sort(documents.begin(), documents.end());
  for (const int64_t document : documents) {
    const int64_t length = 1 + draw(max_length);
    const int64_t position = free_from[document] + draw(2) * draw(300);
    pieces.push_back({local_begin, length, document, position, 1 + draw(2) * draw(9)});
    local_begin += length;
    free_from[document] = pieces.back().PositionOf(length - 1) + 1;
  }
  return pieces;
}

TEST(WorkCountTest, EqualsBruteForce) {
  std::mt19937 random(11);
  for (int round = 0; round < 3000; ++round) {
    // A few long pieces, or many short ones that are mostly seen whole or not at all.
    const auto draw = [&] {
      return random() % 2 == 0 ? DrawPieces(random, 1 + random() % 4, 300)
                               : DrawPieces(random, 1 + random() % 60, 8);
    };
    const std::vector<Piece> q = draw();
    const std::vector<Piece> kv = draw();
    std::vector<Band> bands(3);
    for (Band& band : bands) {
      if (random() % 3 != 0) band.lower = static_cast<int64_t>(random() % 400) - 300;
      if (random() % 3 != 0) {
        band.upper = band.lower == -kUnboundedBand ? static_cast<int64_t>(random() % 400) - 100
                                                   : band.lower + random() % 300;
      }
    }

    WorkCount expected;
    RowRange needed;
    for (const Piece& a : q) {
      for (const Piece& b : kv) {
        if (a.document != b.document) continue;
        for (int64_t begin = 0; begin < a.length; begin += kTileRows) {
          RowRange hull;
          for (int64_t r = begin; r < std::min(begin + kTileRows, a.length); ++r) {
            for (int64_t c = 0; c < b.length; ++c) {
              const int64_t difference = b.PositionOf(c) - a.PositionOf(r);
              const Band& band = bands[a.document];
              if (difference < band.lower || difference > band.upper) continue;
              ++expected.pairs;
              hull = hull.empty() ? RowRange{c, c + 1}
                                  : RowRange{std::min(hull.begin, c), std::max(hull.end, c + 1)};
            }
          }
          if (hull.empty()) continue;
          expected.tiles += (hull.end - 1) / kTileRows - hull.begin / kTileRows + 1;
          hull = {hull.begin + b.local_begin, hull.end + b.local_begin};
          needed = needed.empty() ? hull
                                  : RowRange{std::min(needed.begin, hull.begin),
                                             std::max(needed.end, hull.end)};
        }
      }
    }
    const WorkCount actual = CountWork(q, kv, bands);
    ASSERT_EQ(actual.pairs, expected.pairs) << round;
    ASSERT_EQ(actual.tiles, expected.tiles) << round;
    const RowRange rows = NeededRows(q, kv, bands);
    ASSERT_EQ(rows.begin, needed.begin) << round;
    ASSERT_EQ(rows.end, needed.end) << round;
  }
}

TEST(WorkCountTest, PairsInClosedFormAtScale) {
  constexpr int64_t kTokens = int64_t{1} << 27;
  const std::vector<Piece> all = {{0, kTokens, 0, 0, 1}};
  EXPECT_EQ(CountWork(all, {{0, 1, 0, 0, 1}}, {Band{}}).pairs, kTokens);
  const std::vector<Piece> some = {{0, kTokens / 64, 0, 0, 64}};
  EXPECT_EQ(CountWork(some, some, {Band{-kUnboundedBand, 0}}).pairs,
            kTokens / 64 * (kTokens / 64 + 1) / 2);
}

}  // namespace
}  // namespace ringattn
