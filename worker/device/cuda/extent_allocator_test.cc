#include "worker/device/cuda/extent_allocator.h"

#include <map>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

TEST(ExtentAllocator, TakesSmallestExtentThatFits) {
  ExtentAllocator extents(1000, 1);
  const int64_t a = *extents.Take(300), b = *extents.Take(10), c = *extents.Take(100);
  const int64_t d = *extents.Take(10);
  extents.Give(a);
  extents.Give(c);
  EXPECT_EQ(extents.largest_free_bytes(), 580);
  EXPECT_EQ(*extents.Take(90), c);
  EXPECT_EQ(*extents.Take(200), a);
  EXPECT_FALSE(extents.Take(600).has_value());
  extents.Give(b);
  extents.Give(d);
  EXPECT_EQ(extents.free_bytes(), 1000 - 90 - 200);
}

TEST(ExtentAllocator, RoundsUpAndRejectsTooMuch) {
  ExtentAllocator extents(1023, 256);
  EXPECT_EQ(extents.free_bytes(), 768);
  EXPECT_EQ(*extents.Take(1), 0);
  EXPECT_EQ(*extents.Take(257), 256);
  EXPECT_FALSE(extents.Take(1).has_value());
  EXPECT_EQ(extents.largest_free_bytes(), 0);
}

TEST(ExtentAllocator, ExtentsNeverOverlapAndAllAreFreed) {
  constexpr int64_t kSize = 1 << 16;
  std::mt19937 random(7);
  ExtentAllocator extents(kSize, 64);
  std::map<int64_t, int64_t> taken;
  for (int i = 0; i < 20'000; ++i) {
    if (random() % 2 == 0 || taken.empty()) {
      const int64_t bytes = 1 + random() % 5000;
      const int64_t largest = extents.largest_free_bytes();
      const std::optional<int64_t> offset = extents.Take(bytes);
      ASSERT_EQ(offset.has_value(), bytes <= largest);
      if (!offset.has_value()) continue;
      const auto next = taken.lower_bound(*offset);
      ASSERT_TRUE(next == taken.end() || *offset + bytes <= next->first);
      if (next != taken.begin()) {
        const auto before = std::prev(next);
        ASSERT_LE(before->first + before->second, *offset);
      }
      ASSERT_LE(*offset + bytes, kSize);
      ASSERT_EQ(*offset % 64, 0);
      taken.emplace(*offset, bytes);
    } else {
      const auto one = std::next(taken.begin(), random() % taken.size());
      extents.Give(one->first);
      taken.erase(one);
    }
  }
  for (const auto& [offset, bytes] : taken) extents.Give(offset);
  EXPECT_EQ(extents.free_bytes(), kSize);
  EXPECT_EQ(extents.largest_free_bytes(), kSize);
}

}  // namespace
}  // namespace ringattn::worker
