#include "common/base/byte_range_set.h"

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace ringattn {
namespace {

using Added = ByteRangeSet::Added;

TEST(ByteRangeSetTest, AgreesWithABitmap) {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    const int64_t size = 1 + random() % 60;
    ByteRangeSet set(size);
    std::vector<bool> bitmap(size, false);
    for (int i = 0; i < 200; ++i) {
      const int64_t begin = random() % size;
      const int64_t bytes = 1 + random() % std::min<int64_t>(8, size - begin);
      const auto first = bitmap.begin() + begin;
      const bool overlaps = std::find(first, first + bytes, true) != first + bytes;
      ASSERT_EQ(set.Add(begin, bytes), overlaps ? Added::kOverlaps : Added::kNew);
      if (!overlaps) std::fill_n(first, bytes, true);
      const int64_t covered = std::count(bitmap.begin(), bitmap.end(), true);
      ASSERT_EQ(set.covered_bytes(), covered);
      ASSERT_EQ(set.complete(), covered == size);
      ASSERT_EQ(set.first_missing(),
                std::find(bitmap.begin(), bitmap.end(), false) - bitmap.begin());
    }
  }
}

TEST(ByteRangeSetTest, RangesAreBounded) {
  ByteRangeSet set(1000, 3);
  EXPECT_EQ(set.Add(10, 1), Added::kNew);
  EXPECT_EQ(set.Add(20, 1), Added::kNew);
  EXPECT_EQ(set.Add(30, 1), Added::kNew);
  EXPECT_EQ(set.Add(40, 1), Added::kTooManyRanges);
  EXPECT_EQ(set.covered_bytes(), 3);
  EXPECT_EQ(set.Add(11, 9), Added::kNew);  // joins two ranges
  EXPECT_EQ(set.Add(40, 1), Added::kNew);
}

TEST(ByteRangeSetTest, OutsideAndOverflowLeaveNoMark) {
  ByteRangeSet set(10);
  EXPECT_EQ(set.Add(10, 1), Added::kOutside);
  EXPECT_EQ(set.Add(8, 3), Added::kOutside);
  EXPECT_EQ(set.Add(~uint64_t{0}, 1), Added::kOutside);
  EXPECT_EQ(set.Add(2, ~uint64_t{0}), Added::kOutside);
  EXPECT_EQ(set.Add(uint64_t{1} << 63, 1), Added::kOutside);
  EXPECT_EQ(set.Add(11, 0), Added::kOutside);
  EXPECT_EQ(set.Add(10, 0), Added::kNew);
  EXPECT_EQ(set.covered_bytes(), 0);
  EXPECT_EQ(set.Add(0, 10), Added::kNew);
  EXPECT_TRUE(set.complete());
}

TEST(ByteRangeSetTest, EveryKindOfOverlapIsFound) {
  for (auto [offset, bytes] : std::vector<std::pair<uint64_t, uint64_t>>{
           {20, 10}, {19, 2}, {29, 2}, {22, 3}, {10, 30}, {0, 100}}) {
    ByteRangeSet set(100);
    ASSERT_EQ(set.Add(20, 10), Added::kNew);
    EXPECT_EQ(set.Add(offset, bytes), Added::kOverlaps) << offset << " + " << bytes;
    EXPECT_EQ(set.Add(10, 10), Added::kNew);
    EXPECT_EQ(set.Add(30, 10), Added::kNew);
  }
}

TEST(ByteRangeSetTest, NothingIsMissingFromNothing) {
  EXPECT_TRUE(ByteRangeSet(0).complete());
  EXPECT_EQ(ByteRangeSet(0).Add(0, 0), Added::kNew);
  EXPECT_EQ(ByteRangeSet(0).Add(0, 1), Added::kOutside);
  EXPECT_FALSE(ByteRangeSet(1).complete());
}

}  // namespace
}  // namespace ringattn
