#include "worker/kernels/cuda/sm90/terms/pair_rules.h"

#include <cstdint>
#include <initializer_list>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace ringattn::worker::cuda::sm90 {
namespace {

IdSpan SpanOf(const std::vector<int32_t>& ids) {
  IdSpan span;
  for (int32_t id : ids) span.Add(id);
  return span;
}

// Empty means that no token sees any token; unchecked means that every token sees every token.
TEST(PairRulesTest, IdClassesAreTrueOfRandomIds) {
  std::mt19937 random(1);
  int empty = 0, full = 0;
  for (int round = 0; round < 3000; ++round) {
    const auto draw = [&] {
      std::vector<int32_t> ids(random() % 5);
      const int32_t base = random() % 4;
      for (int32_t& id : ids)
        id = base + static_cast<int32_t>(random() % 2) - (random() % 8 == 0) * 9;
      return ids;
    };
    const std::vector<int32_t> a = draw(), b = draw();
    bool some = false, all = true;
    for (int32_t x : a) {
      for (int32_t y : b) (x == y && x >= 0 ? some : all) = x == y && x >= 0;
    }
    const uint8_t pair = SpanOf(a).Beside(SpanOf(b));
    EXPECT_EQ(pair, SpanOf(b).Beside(SpanOf(a)));
    EXPECT_FALSE(pair == 0 && some);
    EXPECT_FALSE(pair == kPairSeen && !(some && all));
    empty += pair == 0;
    full += pair == kPairSeen;
  }
  EXPECT_GT(empty, 300);
  EXPECT_GT(full, 30);
}

TEST(PairRulesTest, MaskClasses) {
  EXPECT_EQ(MaskClass(false, false), 0);
  EXPECT_EQ(MaskClass(false, true), 0);  // without any pairs
  EXPECT_EQ(MaskClass(true, true), kPairSeen);
  EXPECT_EQ(MaskClass(true, false), kPairSeen | kPairChecked);
}

TEST(PairRulesTest, EachThreadHasItsColumnsBits) {
  std::mt19937 random(2);
  for (int round = 0; round < 100; ++round) {
    const uint32_t word = random();
    for (int q = 0; q < 4; ++q) {
      for (int m = 0; m < 4; ++m) {
        for (int i = 0; i < 2; ++i) {
          EXPECT_EQ(PairsOf(word, q) >> (2 * m + i) & 1, word >> (8 * m + 2 * q + i) & 1);
        }
      }
      EXPECT_EQ(PairsOf(word, q) >> 8, 0u);
    }
  }
}

TEST(PairRulesTest, ColumnsEndWhereTheyEnd) {
  for (int first : {0, 32, 96}) {
    for (int columns = 0; columns < 140; ++columns) {
      for (int bit = 0; bit < 32; ++bit) {
        EXPECT_EQ(ColumnsBelow(first, columns) >> bit & 1, first + bit < columns ? 1u : 0u);
      }
    }
  }
}

}  // namespace
}  // namespace ringattn::worker::cuda::sm90
