#include "common/kv/block_set.h"

#include <random>
#include <set>

#include "gtest/gtest.h"

namespace ringattn {
namespace {

TEST(KvBlockSetTest, FullSetsGiveTheirNumbersInAscendingOrder) {
  for (const int64_t blocks : {1, 63, 64, 65, 4096, 4097, 300'000}) {
    KvBlockSet set(blocks, true);
    ASSERT_EQ(set.size(), blocks);
    for (int64_t i = 0; i < blocks; ++i) {
      ASSERT_EQ(set.Lowest(), i);
      set.Remove(set.Lowest());
    }
    EXPECT_EQ(set.size(), 0);
  }
}

TEST(KvBlockSetTest, AgreesWithAnOrderedSet) {
  constexpr int64_t kBlocks = 10'000;
  std::mt19937 random(1);
  KvBlockSet set(kBlocks, false);
  std::set<uint32_t> expected;
  for (int i = 0; i < 100'000; ++i) {
    // Sparse and dense by turns.
    const uint32_t block = random() % (i / 1000 % 2 == 0 ? kBlocks : 200);
    if (set.Contains(block)) {
      set.Remove(block);
      expected.erase(block);
    } else {
      EXPECT_TRUE(set.Insert(block));
      EXPECT_FALSE(set.Insert(block));
      expected.insert(block);
    }
    ASSERT_EQ(set.size(), static_cast<int64_t>(expected.size()));
    if (!expected.empty()) {
      ASSERT_EQ(set.Lowest(), *expected.begin());
    }
  }
}

}  // namespace
}  // namespace ringattn
