#include "server/edge/byte_ranges.h"

#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

using Added = ByteRanges::Added;

TEST(ByteRangesTest, AgreesWithABitmap) {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    const int64_t size = 1 + random() % 60;
    ByteRanges ranges(size, 1000);
    std::vector<bool> bitmap(size, false);
    for (int i = 0; i < 200; ++i) {
      const int64_t begin = random() % size;
      const int64_t end = begin + 1 + random() % std::min<int64_t>(8, size - begin);
      bool overlaps = false;
      int64_t covered = 0;
      for (int64_t at = begin; at < end; ++at) overlaps = overlaps || bitmap[at];
      ASSERT_EQ(ranges.Add(begin, end), overlaps ? Added::kOverlaps : Added::kNew);
      for (int64_t at = begin; at < end && !overlaps; ++at) bitmap[at] = true;
      for (bool bit : bitmap) covered += bit;
      ASSERT_EQ(ranges.covered(), covered);
      ASSERT_EQ(ranges.complete(), covered == size);
      int64_t first_missing = 0;
      while (first_missing < size && bitmap[first_missing]) ++first_missing;
      ASSERT_EQ(ranges.first_missing(), first_missing);
    }
  }
}

TEST(ByteRangesTest, GapsAreBounded) {
  ByteRanges ranges(1000, 3);
  EXPECT_EQ(ranges.Add(10, 11), Added::kNew);
  EXPECT_EQ(ranges.Add(20, 21), Added::kNew);
  EXPECT_EQ(ranges.Add(30, 31), Added::kNew);
  EXPECT_EQ(ranges.Add(40, 41), Added::kTooManyGaps);
  EXPECT_EQ(ranges.covered(), 3);
  EXPECT_EQ(ranges.Add(11, 20), Added::kNew);  // closes one
  EXPECT_EQ(ranges.Add(40, 41), Added::kNew);
}

TEST(ByteRangesTest, NothingIsMissingFromNothing) {
  EXPECT_TRUE(ByteRanges(0, 1).complete());
  EXPECT_FALSE(ByteRanges(1, 1).complete());
}

}  // namespace
}  // namespace ringattn::server
