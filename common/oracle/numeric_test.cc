#include "common/oracle/numeric.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "gtest/gtest.h"

namespace ringattn::oracle {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double Decode(DType dtype, uint16_t bits) { return Load(dtype, &bits, 0); }

uint16_t Encode(DType dtype, double value) {
  uint16_t bits = 0;
  Store(dtype, &bits, 0, value);
  return bits;
}

TEST(Numeric, KnownBitPatterns) {
  EXPECT_EQ(Decode(DType::kFloat16, 0x3c00), 1.0);
  EXPECT_EQ(Decode(DType::kFloat16, 0xc000), -2.0);
  EXPECT_EQ(Decode(DType::kFloat16, 0x7bff), 65504.0);
  EXPECT_EQ(Decode(DType::kFloat16, 0x0001), 0x1p-24);
  EXPECT_EQ(Decode(DType::kFloat16, 0x0400), 0x1p-14);
  EXPECT_EQ(Decode(DType::kFloat16, 0x3555), 0.333251953125);
  EXPECT_EQ(Decode(DType::kBFloat16, 0x3f80), 1.0);
  EXPECT_EQ(Decode(DType::kBFloat16, 0x4049), 3.140625);
  EXPECT_EQ(Decode(DType::kBFloat16, 0x7f80), kInfinity);
}

TEST(Numeric, LoadManyEqualsLoad) {
  std::vector<uint16_t> bits;
  for (uint32_t b = 0; b < 0x10000; b += 7) bits.push_back(b);
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    const int64_t count = static_cast<int64_t>(bits.size()) * 2 / BytesOf(dtype) - 1;
    std::vector<double> many(count - 1);
    LoadMany(dtype, bits.data(), 1, count - 1, many.data());
    for (int64_t i = 0; i + 1 < count; ++i) {
      const double one = Load(dtype, bits.data(), i + 1);
      ASSERT_TRUE(many[i] == one || (std::isnan(many[i]) && std::isnan(one)));
    }
  }
}

// Every finite number round-trips. Between two adjacent numbers the boundary is the midpoint, which
// rounds to the even one.
void CheckEveryNeighbour(DType dtype, uint16_t infinity) {
  for (uint16_t bits = 0; bits < infinity; ++bits) {
    const double low = Decode(dtype, bits);
    ASSERT_EQ(Encode(dtype, low), bits);
    ASSERT_EQ(Encode(dtype, -low), bits | 0x8000);
    if (bits + 1 == infinity) break;
    const double high = Decode(dtype, bits + 1);
    ASSERT_LT(low, high);
    const double middle = low + (high - low) / 2;
    ASSERT_EQ(RoundTo(dtype, middle), bits % 2 == 0 ? low : high) << bits;
    ASSERT_EQ(RoundTo(dtype, std::nextafter(middle, 0.0)), low) << bits;
    ASSERT_EQ(RoundTo(dtype, -std::nextafter(middle, kInfinity)), -high) << bits;
  }
}

TEST(Numeric, RoundsToNearestEvenFloat16) { CheckEveryNeighbour(DType::kFloat16, 0x7c00); }
TEST(Numeric, RoundsToNearestEvenBFloat16) { CheckEveryNeighbour(DType::kBFloat16, 0x7f80); }

TEST(Numeric, OverflowAndNan) {
  EXPECT_EQ(RoundTo(DType::kFloat16, 65519.9), 65504.0);
  EXPECT_EQ(RoundTo(DType::kFloat16, 65520.0), kInfinity);
  EXPECT_EQ(RoundTo(DType::kFloat16, -1e9), -kInfinity);
  EXPECT_EQ(RoundTo(DType::kBFloat16, 1e39), kInfinity);
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    float storage = 0.0f;
    Store(dtype, &storage, 0, std::nan(""));
    EXPECT_TRUE(std::isnan(Load(dtype, &storage, 0)));
    Store(dtype, &storage, 0, -kInfinity);
    EXPECT_EQ(Load(dtype, &storage, 0), -kInfinity);
    EXPECT_TRUE(std::signbit(RoundTo(dtype, -0.0)));
  }
}

TEST(Numeric, SmallLosses) {
  EXPECT_EQ(SubnormalLoss(DType::kFloat16, 0x1p-14), 0.0);
  EXPECT_EQ(SubnormalLoss(DType::kFloat16, 0x1p-15), 0x1p-25);
  EXPECT_EQ(SubnormalLoss(DType::kFloat16, 0x1p-30), 0x1p-25);
  EXPECT_EQ(SubnormalLoss(DType::kFloat16, 0.0), 0.0);
  EXPECT_EQ(SubnormalLoss(DType::kBFloat16, 0x1p-30), 0.0);
  EXPECT_EQ(ResultLoss(DType::kFloat16, 0x1p-14), 0.0);
  EXPECT_EQ(ResultLoss(DType::kFloat16, -0x1.fp-15), 0x1p-25);
  EXPECT_EQ(ResultLoss(DType::kFloat16, 0.0), 0x1p-25);
  EXPECT_EQ(ResultLoss(DType::kBFloat16, 0.0), 0.0);
  EXPECT_EQ(ResultLoss(DType::kFloat32, 0x1p-30), 0.0);
  EXPECT_EQ(Float32Flush(1e-30), 0.0);
  EXPECT_EQ(Float32Flush(1e-37), 1e-37);
  EXPECT_EQ(Float32Flush(1e-44), 0x1p-126);
  EXPECT_EQ(Float32Flush(0.0), 0.0);
}

}  // namespace
}  // namespace ringattn::oracle
