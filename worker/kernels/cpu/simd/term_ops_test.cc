#include "worker/kernels/cpu/simd/term_ops.h"

#include <cmath>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "hwy/targets.h"

namespace ringattn::worker::cpu {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

TEST(Philox, KnownAnswers) {
  const auto expect = [](PhiloxBlock counter, uint32_t key0, uint32_t key1, PhiloxBlock expected) {
    const PhiloxBlock x = Philox(counter, key0, key1);
    EXPECT_EQ(x.x0, expected.x0);
    EXPECT_EQ(x.x1, expected.x1);
    EXPECT_EQ(x.x2, expected.x2);
    EXPECT_EQ(x.x3, expected.x3);
  };
  constexpr uint32_t kOnes = 0xffffffff;
  expect({0, 0, 0, 0}, 0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  expect({kOnes, kOnes, kOnes, kOnes}, kOnes, kOnes,
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  expect({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0xa4093822, 0x299f31d0,
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

// Each instruction set gives the same bits.
class TermOps : public testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override {
    if (GetParam() != 0 && (hwy::SupportedTargets() & GetParam()) == 0) GTEST_SKIP();
    if (GetParam() != 0) hwy::SetSupportedTargetsForTest(GetParam());
  }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

TEST_P(TermOps, KeepWordsAreThoseOfPhilox) {
  const PhiloxRow row{0x12345678, 0x9abcdef0, 7, 11, 13};
  for (const uint32_t threshold : {1u, 6554u, 32768u, 65535u}) {
    for (const int count : {1, 2, 3, 5, 33}) {
      std::vector<uint32_t> words(count);
      KeepWords(row, 1000, threshold, count, words.data());
      for (int w = 0; w < count; ++w) EXPECT_EQ(words[w], KeepWord(row, 1000 + w, threshold));
    }
  }
}

TEST_P(TermOps, KeepBitsAreExpandedFromAnyBit) {
  const std::vector<uint32_t> words = {0xdeadbeef, 0x01234567, 0x89abcdef, 0};
  for (const int first : {0, 1, 17, 31}) {
    std::vector<float> factors(60, -1.0f);
    ExpandKeepBits(words.data(), first, 1.5f, 57, factors.data());
    for (int c = 0; c < 57; ++c) {
      const int bit = first + c;
      EXPECT_EQ(factors[c], (words[bit / 32] >> (bit % 32) & 1) != 0 ? 1.5f : 0.0f);
    }
    EXPECT_EQ(factors[57], -1.0f);
  }
}

TEST_P(TermOps, MasksHide) {
  std::vector<uint8_t> bytes(50);
  std::vector<uint8_t> bits(8);
  std::vector<int32_t> ids(50);
  for (int c = 0; c < 50; ++c) {
    bytes[c] = c % 3 == 0 ? 0 : c;
    ids[c] = c % 3 == 0 ? 8 : 7;
    if (c % 3 != 0) bits[(c + 5) / 8] |= 1 << ((c + 5) % 8);
  }
  std::vector<float> by_bytes(51, 2.0f), by_bits = by_bytes, by_ids = by_bytes, by_none = by_bytes;
  MaskByBytes(bytes.data(), 50, by_bytes.data());
  MaskByBits(bits.data(), 5, 50, by_bits.data());
  MaskByIds(7, ids.data(), 50, by_ids.data());
  MaskByIds(-7, ids.data(), 50, by_none.data());
  for (int c = 0; c < 50; ++c) {
    const float expected = c % 3 == 0 ? kMinusInfinity : 2.0f;
    EXPECT_EQ(by_bytes[c], expected);
    EXPECT_EQ(by_bits[c], expected);
    EXPECT_EQ(by_ids[c], expected);
    EXPECT_EQ(by_none[c], kMinusInfinity);
  }
  EXPECT_EQ(by_bytes[50], 2.0f);
  EXPECT_EQ(by_ids[50], 2.0f);
}

TEST_P(TermOps, DistancesAreExact) {
  for (const int64_t distance : {int64_t{-3}, int64_t{20}, int64_t{1} << 20, int64_t{1} << 40}) {
    std::vector<float> row(40, 1.0f);
    SubtractDistance(0.5f, distance, 39, row.data());
    for (int c = 0; c < 39; ++c) {
      EXPECT_EQ(row[c], static_cast<float>(1 - 0.5 * std::abs(static_cast<double>(distance - c))));
    }
    EXPECT_EQ(row[39], 1.0f);
  }
}

TEST_P(TermOps, FinishedScoresLoseTheirDistance) {
  for (const int64_t distance :
       {int64_t{-3}, int64_t{20}, (int64_t{1} << 24) - 40, int64_t{1} << 24, int64_t{1} << 40}) {
    for (const bool adds : {false, true}) {
      std::vector<float> scores(48, 3.0f), add(48, 0.25f);
      add[7] = kMinusInfinity;
      FinishScores({.count = 48,
                    .scale = 0.5f,
                    .slope = 0.125f,
                    .distance = distance,
                    .add = adds ? add.data() : nullptr,
                    .scores = scores.data()});
      for (int c = 0; c < 48; ++c) {
        const double before = 1.5 + (adds ? add[c] : 0.0f);
        EXPECT_EQ(scores[c],
                  static_cast<float>(before - 0.125 * std::abs(static_cast<double>(distance - c))));
      }
    }
  }
}

TEST_P(TermOps, HiddenScoresAreMinusInfinityWhateverTheProduct) {
  std::vector<float> scores(32, std::numeric_limits<float>::quiet_NaN()), add(32, kMinusInfinity);
  scores[3] = 2.0f;
  add[3] = 1.0f;
  for (const float cap : {0.0f, 4.0f}) {
    std::vector<float> finished = scores, slopes(32);
    FinishScores({.count = 32,
                  .scale = 0.5f,
                  .cap = cap,
                  .add = add.data(),
                  .scores = finished.data(),
                  .slopes = slopes.data()});
    for (int c = 0; c < 32; ++c) {
      if (c != 3) {
        EXPECT_EQ(finished[c], kMinusInfinity);
      }
    }
    EXPECT_NEAR(finished[3], cap == 0 ? 2.0 : 1 + 4 * std::tanh(0.25), 1e-6);
    if (cap != 0) {
      EXPECT_NEAR(slopes[3], 1 - std::pow(std::tanh(0.25), 2), 1e-6);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Simd, TermOps, testing::Values(0, HWY_AVX3, HWY_AVX2, HWY_SCALAR));

}  // namespace
}  // namespace ringattn::worker::cpu
