#include "worker/kernels/cuda/plan/keep_bits.h"

#include <cstdint>
#include <random>

#include "gtest/gtest.h"

namespace ringattn::worker::cuda {
namespace {

constexpr uint32_t kThreshold = 20000;

PhiloxRow RandomRow(std::mt19937& random) {
  PhiloxRow row;
  row.key0 = random();
  row.key1 = random();
  row.row = random();
  row.head = random() % 64;
  row.batch = random() % 8;
  return row;
}

// Computed from the words from which the other back ends take their bits.
bool Expected(const PhiloxRow& row, uint64_t key) {
  return KeepWord(row, static_cast<uint32_t>(key / 32), kThreshold) >> (key % 32) & 1;
}

TEST(KeepBitsTest, EveryOffsetHasTheBitsOfItsKeys) {
  std::mt19937 random(3);
  int kept = 0;
  for (uint64_t origin : {uint64_t{0}, uint64_t{4096}, uint64_t{3'999'999'989u} + 5}) {
    for (uint64_t offset = 0; offset < 70; ++offset) {
      const PhiloxRow row = RandomRow(random);
      const uint64_t key = origin + offset;
      const uint32_t bits = KeepBits(row, key, kThreshold);
      for (uint32_t bit = 0; bit < 32; ++bit) {
        const uint64_t at = key + bit / 2 * 8 + bit % 2;
        EXPECT_EQ(bits >> bit & 1, Expected(row, at)) << "key " << key << " bit " << bit;
        EXPECT_EQ(Keeps(row, at, kThreshold), Expected(row, at));
        kept += bits >> bit & 1;
      }
    }
  }
  // About 1 - 20000 / 65536 of them.
  EXPECT_NEAR(kept / (3 * 70 * 32.0), 0.695, 0.03);
}

TEST(KeepBitsTest, StridesHaveTheBitsOfTheirKeys) {
  std::mt19937 random(4);
  for (uint64_t stride : {1, 2, 3, 8, 33}) {
    const PhiloxRow row = RandomRow(random);
    const uint64_t key = random() % 1000;
    const uint32_t bits = StridedKeepBits(row, key, stride, kThreshold);
    if (stride == 1) {
      EXPECT_EQ(bits, KeepBits(row, key, kThreshold));
    }
    for (uint32_t bit = 0; bit < 32; ++bit) {
      EXPECT_EQ(bits >> bit & 1, Expected(row, key + stride * (bit / 2 * 8 + bit % 2)));
    }
  }
}

TEST(KeepBitsTest, SumsOfClampedLanesAreTheirBits) {
  std::mt19937 random(5);
  for (uint32_t threshold : {1u, 2u, 6554u, 32767u, 32768u, 32769u, 65534u, 65535u}) {
    for (int parts : {1, 8, 16}) {
      for (int round = 0; round < 50; ++round) {
        KeepSum sum(threshold);
        uint32_t expected = 0;
        for (int j = 0; j < parts; ++j) {
          // Lanes on both sides of the threshold, and random ones.
          const uint32_t lanes[] = {static_cast<uint32_t>(random()) & 0xffff, threshold,
                                    threshold - 1, 0, 0xffff};
          const uint32_t low = lanes[random() % 5], high = lanes[random() % 5];
          sum.Add(high << 16 | low, j);
          expected |= uint32_t{low >= threshold} << j | uint32_t{high >= threshold} << (16 + j);
        }
        EXPECT_EQ(sum.Bits(), expected) << "threshold " << threshold << " parts " << parts;
      }
    }
  }
}

TEST(KeepBitsTest, MasksOfClampedLanes) {
  std::mt19937 random(5);
  for (uint32_t threshold : {1u, 2u, 6554u, 32767u, 32768u, 32769u, 65534u, 65535u}) {
    const KeepMask mask(threshold);
    for (int round = 0; round < 200; ++round) {
      const uint32_t lanes[] = {static_cast<uint32_t>(random()) & 0xffff, threshold, threshold - 1,
                                0, 0xffff};
      const uint32_t low = lanes[random() % 5], high = lanes[random() % 5];
      const uint32_t expected =
          (low >= threshold ? 0xffffu : 0u) | (high >= threshold ? 0xffff0000u : 0u);
      EXPECT_EQ(mask.Of(high << 16 | low), expected) << "threshold " << threshold;
    }
  }
}

TEST(KeepBitsTest, PairsOfColumnsByHalves) {
  for (int bit = 0; bit < 32; ++bit) {
    EXPECT_EQ(ByHalves(1u << bit), 1u << (bit % 2 * 16 + bit / 2)) << bit;
  }
  EXPECT_EQ(ByHalves(0xffffffff), 0xffffffffu);
  EXPECT_EQ(ByHalves(0x55555555), 0xffffu);
}

TEST(KeepBitsTest, ThresholdsAtTheirEnds) {
  std::mt19937 random(5);
  const PhiloxRow row = RandomRow(random);
  EXPECT_EQ(KeepBits(row, 7, 0), 0xffffffffu);
  EXPECT_EQ(KeepBits(row, 6, 65536), 0u);
}

// The products that calls share do not change the results.
TEST(KeepBitsTest, PartsMakePhilox) {
  std::mt19937 random(5);
  for (int i = 0; i < 1000; ++i) {
    const uint32_t key0 = random(), key1 = random();
    const uint32_t counter = random(), row = random(), head = random(), batch = random();
    const PhiloxKeys keys(key0, key1);
    const PhiloxBlock expected = Philox({counter, row, head, batch}, key0, key1);
    const PhiloxBlock actual =
        PhiloxOf(keys, RowPartOf(keys, row, head), CounterPartOf(keys, counter, head, batch));
    ASSERT_EQ(actual.x0, expected.x0);
    ASSERT_EQ(actual.x1, expected.x1);
    ASSERT_EQ(actual.x2, expected.x2);
    ASSERT_EQ(actual.x3, expected.x3);
    for (uint32_t threshold : {0u, 1u, 6554u, 65535u, expected.x0 >> 16, expected.x0 & 0xffff}) {
      EXPECT_EQ(KeepsUpper(expected.x0, threshold), expected.x0 >> 16 >= threshold);
      EXPECT_EQ(KeepsUpper(expected.x0 << 16, threshold), (expected.x0 & 0xffff) >= threshold);
    }
  }
}

}  // namespace
}  // namespace ringattn::worker::cuda
