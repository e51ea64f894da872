#include "worker/kernels/cuda/paged/key_passes.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "worker/kernels/cuda/paged/parts_test_rows.h"

namespace ringattn::worker::cuda::paged {
namespace {

// Walks one item and checks that each pair of a query and a key that it sees occurs in one pass,
// and no other pair in any.
template <int kKeys>
void CheckItem(const PartCase& c, int32_t first_query, int32_t queries, const KeySpan& keys,
               int32_t tile_begin, int32_t tile_end) {
  const int32_t length = static_cast<int32_t>(c.places.size());
  std::vector<std::vector<int>> seen(queries, std::vector<int>(length, 0));
  KeyPasses<kKeys> passes(c.row, c.mask, keys, first_query, queries, tile_begin, tile_end);
  int32_t before = tile_end * kKeys;
  for (KeyPass pass;;) {
    pass = passes.Next();
    ASSERT_GE(pass.first, tile_begin * kKeys);
    ASSERT_LE(pass.first, before);
    ASSERT_TRUE(c.mask.part.count == 1 || pass.end <= before);
    before = pass.first;
    for (int32_t r = 0; r < queries; ++r) {
      for (int32_t column = 0; column < kKeys; ++column) {
        if (pass.masked && (column < pass.lower + r || column > pass.upper + r)) continue;
        if (pass.masked && column >= pass.columns) continue;
        const int32_t key = pass.first + column;
        ASSERT_LT(key, pass.end);
        ASSERT_GE(key, keys.begin);
        ++seen[r][key];
      }
    }
    if (pass.last) break;
  }
  for (int32_t r = 0; r < queries; ++r) {
    for (int32_t key = 0; key < length; ++key) {
      const bool in_item = key >= tile_begin * kKeys && key < tile_end * kKeys;
      ASSERT_EQ(seen[r][key], in_item && c.Sees(first_query + r, key) ? 1 : 0)
          << "query " << first_query + r << " key " << key << " parts " << c.mask.part.count;
    }
  }
}

template <int kKeys>
void CheckAll(int seed) {
  std::mt19937 random(seed);
  for (int i = 0; i < 1500; ++i) {
    const PartCase c = DrawPartCase(random, 140, 5);
    // As in the prefill: the keys of the item. As in the decode: those of the whole row, in pieces.
    const int32_t unit = std::uniform_int_distribution<int>(1, 140)(random);
    const KeySpan of_row = VisibleKeys(c.row, c.mask, 0, c.row.q_tokens);
    for (int32_t first = 0; first < c.row.q_tokens; first += unit) {
      const int32_t queries = std::min(unit, c.row.q_tokens - first);
      const KeySpan of_item = VisibleKeys(c.row, c.mask, first, first + queries);
      for (const KeySpan& keys : {of_item, of_row}) {
        const TileSpan tiles = TilesOf<kKeys>(keys);
        const int32_t cut = std::uniform_int_distribution<int>(tiles.begin, tiles.end)(random);
        if (cut > tiles.begin) CheckItem<kKeys>(c, first, queries, keys, tiles.begin, cut);
        if (cut < tiles.end) CheckItem<kKeys>(c, first, queries, keys, cut, tiles.end);
      }
    }
  }
}

TEST(KeyPasses, EachVisiblePairIsInOnePass) {
  CheckAll<64>(1);
  CheckAll<96>(2);
  CheckAll<128>(3);
}

TEST(KeyPasses, OneQueryTakesOnePassForEachTile) {
  std::mt19937 random(4);
  for (int i = 0; i < 500; ++i) {
    const PartCase c = DrawPartCase(random, 1, 5);
    const KeySpan keys = VisibleKeys(c.row, c.mask, 0, 1);
    const TileSpan tiles = TilesOf<128>(keys);
    KeyPasses<128> passes(c.row, c.mask, keys, 0, 1, tiles.begin, tiles.end);
    for (int32_t tile = tiles.end - 1; tile >= tiles.begin; --tile) {
      const KeyPass pass = passes.Next();
      EXPECT_EQ(pass.first, tile * 128);
      EXPECT_EQ(pass.last, tile == tiles.begin);
    }
  }
}

// Tiles between the two ends of what the queries see take one pass without a mask.
TEST(KeyPasses, TilesThatAllQueriesSeeAreNotCut) {
  PagedRow row;
  row.q_tokens = 128;
  row.keep_length = 10000;  // of 40000, on part 1 of 4
  row.first_position = 40000 - 128;
  const MaskRule mask{1, -1, {4, 1, 4}};
  const KeySpan keys = VisibleKeys(row, mask, 0, 128);
  const TileSpan tiles = TilesOf<128>(keys);
  KeyPasses<128> passes(row, mask, keys, 0, 128, tiles.begin, tiles.end);
  int cut = 0, whole = 0;
  for (KeyPass pass;;) {
    pass = passes.Next();
    ++(pass.masked ? cut : whole);
    if (pass.last) break;
  }
  EXPECT_EQ(whole, 77);
  EXPECT_LE(cut, 9);
}

}  // namespace
}  // namespace ringattn::worker::cuda::paged
