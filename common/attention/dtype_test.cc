#include "common/attention/dtype.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace ringattn {
namespace {

// Computes the value of a 16-bit float from its definition: sign, exponent, fraction.
double ValueOf(uint16_t bits, int exponent_bits) {
  const int fraction_bits = 15 - exponent_bits;
  const int exponent = (bits >> fraction_bits) & ((1 << exponent_bits) - 1);
  const int fraction = bits & ((1 << fraction_bits) - 1);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) {
    return fraction != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign * std::ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
}

struct Format {
  DType dtype;
  int exponent_bits;
  float (*to_float)(uint16_t);
  uint16_t (*from_float)(float);
};
const Format kFormats[] = {
    {DType::kBFloat16, 8, BFloat16ToFloat, FloatToBFloat16},
    {DType::kFloat16, 5, Float16ToFloat, FloatToFloat16},
};

TEST(DTypeTest, EveryHalfPrecisionValueGoesThereAndBack) {
  for (const Format& format : kFormats) {
    for (int i = 0; i < 65536; ++i) {
      const auto bits = static_cast<uint16_t>(i);
      const double expected = ValueOf(bits, format.exponent_bits);
      const float value = format.to_float(bits);
      if (std::isnan(expected)) {
        EXPECT_TRUE(std::isnan(value));
        EXPECT_TRUE(std::isnan(format.to_float(format.from_float(value)))) << i;
      } else {
        EXPECT_EQ(value, expected) << i;
        EXPECT_EQ(format.from_float(value), bits) << i;
      }
    }
  }
}

// Round to nearest even between every two adjacent values: the midpoint rounds to the even one, its
// fp32 neighbours to the nearer one.
TEST(DTypeTest, RoundsToNearestEven) {
  for (const Format& format : kFormats) {
    const int infinity = ((1 << format.exponent_bits) - 1) << (15 - format.exponent_bits);
    for (int i = 0; i < infinity; ++i) {
      const auto low = static_cast<uint16_t>(i);
      const auto high = static_cast<uint16_t>(i + 1);
      const double below = ValueOf(low, format.exponent_bits);
      // The step to infinity has the width of the step before it.
      const double above = i + 1 < infinity ? ValueOf(high, format.exponent_bits)
                                            : 2 * below - ValueOf(i - 1, format.exponent_bits);
      const auto midpoint = static_cast<float>((below + above) / 2);
      if (midpoint != (below + above) / 2) continue;  // not an fp32 value
      const uint16_t even = (i & 1) == 0 ? low : high;
      EXPECT_EQ(format.from_float(midpoint), even) << i;
      EXPECT_EQ(format.from_float(-midpoint), even | 0x8000) << i;
      EXPECT_EQ(format.from_float(std::nextafter(midpoint, 0.0f)), low) << i;
      EXPECT_EQ(format.from_float(std::nextafter(midpoint, HUGE_VALF)), high) << i;
    }
  }
}

TEST(DTypeTest, SpecialValues) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const Format& format : kFormats) {
    EXPECT_EQ(format.to_float(format.from_float(infinity)), infinity);
    EXPECT_EQ(format.to_float(format.from_float(-infinity)), -infinity);
    EXPECT_EQ(format.to_float(format.from_float(std::numeric_limits<float>::max())), infinity);
    EXPECT_TRUE(std::signbit(format.to_float(format.from_float(-0.0f))));
    EXPECT_EQ(format.from_float(std::numeric_limits<float>::denorm_min()), 0);
    // NaNs with a payload only in the discarded bits.
    for (uint32_t bits : {0x7f800001u, 0xff800001u, 0x7fffffffu, 0xffffffffu}) {
      EXPECT_TRUE(std::isnan(format.to_float(format.from_float(std::bit_cast<float>(bits)))));
    }
  }
}

TEST(DTypeTest, ArraysConvertLikeScalars) {
  std::mt19937 random(7);
  std::vector<float> values(1001);
  for (float& value : values) value = std::bit_cast<float>(uint32_t(random()) & 0xbfffffffu);
  for (const Format& format : kFormats) {
    std::vector<uint16_t> halves(values.size());
    std::vector<float> back(values.size());
    ConvertFromFloat(format.dtype, values.data(), halves.data(), 1001);
    ConvertToFloat(format.dtype, halves.data(), back.data(), 1001);
    for (size_t i = 0; i < values.size(); ++i) {
      EXPECT_EQ(halves[i], format.from_float(values[i]));
      EXPECT_EQ(std::bit_cast<uint32_t>(back[i]),
                std::bit_cast<uint32_t>(format.to_float(halves[i])));
    }
  }
  std::vector<float> copy(values.size());
  ConvertFromFloat(DType::kFloat32, values.data(), copy.data(), 1001);
  EXPECT_EQ(copy, values);
  ConvertToFloat(DType::kFloat32, nullptr, nullptr, 0);
}

TEST(DTypeTest, NamesAndSizes) {
  EXPECT_EQ(ElementBytes(DType::kFloat32), 4);
  EXPECT_EQ(ElementBytes(DType::kBFloat16), 2);
  EXPECT_EQ(ElementBytes(DType::kFloat16), 2);
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    EXPECT_EQ(DTypeFromName(DTypeName(dtype)), dtype);
  }
  EXPECT_EQ(DTypeFromName("fp64"), std::nullopt);
}

}  // namespace
}  // namespace ringattn
