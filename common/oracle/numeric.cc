#include "common/oracle/numeric.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace ringattn::oracle {
namespace {

// A binary format narrower than double.
struct Format {
  int fraction_bits;
  int min_exponent;  // of the smallest normal number
  double max;        // largest finite value
};
constexpr Format kBFloat16Format{7, -126, 0x1.FEp127};
constexpr Format kFloat16Format{10, -14, 65504.0};
constexpr Format kE4m3Format{3, -6, 448.0};

double RoundToFormat(const Format& format, double value) {
  if (!std::isfinite(value) || value == 0.0) return value;
  const int biased = static_cast<int>(std::bit_cast<uint64_t>(value) >> 52 & 0x7ff);
  int exponent = biased - 1023;
  if (exponent < format.min_exponent) exponent = format.min_exponent;
  // The spacing of the format around `value`, a power of two built from its bits.
  const int64_t spacing_exponent = exponent - format.fraction_bits;
  const double spacing = std::bit_cast<double>((spacing_exponent + 1023) << 52);
  // |value / spacing| < 2^12, so adding 1.5 * 2^52 leaves an integer, ties to even.
  constexpr double kMagic = 0x1.8p52;
  const double steps = (value / spacing + kMagic) - kMagic;
  const double rounded = std::copysign(steps * spacing, value);
  if (std::abs(rounded) > format.max) {
    return std::copysign(std::numeric_limits<double>::infinity(), value);
  }
  return rounded;
}

double DecodeFloat16(uint16_t bits) {
  const int exponent = bits >> 10 & 0x1f;
  const int fraction = bits & 0x3ff;
  double magnitude;
  if (exponent == 31) {
    magnitude = fraction != 0 ? std::numeric_limits<double>::quiet_NaN()
                              : std::numeric_limits<double>::infinity();
  } else if (exponent == 0) {
    magnitude = fraction * 0x1p-24;
  } else {
    // 1.fraction * 2^(exponent - 15), assembled as a double.
    magnitude = std::bit_cast<double>(static_cast<uint64_t>(exponent - 15 + 1023) << 52 |
                                      static_cast<uint64_t>(fraction) << 42);
  }
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

// REQUIRES: value is NaN, infinite or exactly an fp16 number.
uint16_t EncodeFloat16(double value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return sign | 0x7e00;
  const double magnitude = std::abs(value);
  if (std::isinf(value)) return sign | 0x7c00;
  if (magnitude < 0x1p-14) return sign | static_cast<uint16_t>(magnitude * 0x1p24);
  const uint64_t bits = std::bit_cast<uint64_t>(magnitude);
  const int exponent = static_cast<int>(bits >> 52) - 1023 + 15;
  return sign | static_cast<uint16_t>(exponent << 10 | (bits >> 42 & 0x3ff));
}

}  // namespace

double Load(DType dtype, const void* data, int64_t index) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<const float*>(data)[index];
    case DType::kBFloat16: {
      const uint32_t bits = static_cast<const uint16_t*>(data)[index];
      return std::bit_cast<float>(bits << 16);
    }
    case DType::kFloat16:
      return DecodeFloat16(static_cast<const uint16_t*>(data)[index]);
  }
  return std::numeric_limits<double>::quiet_NaN();
}

void LoadMany(DType dtype, const void* data, int64_t first, int64_t count, double* target) {
  // One loop per dtype: sampled rows of long sequences spend most time here.
  switch (dtype) {
    case DType::kFloat32:
      for (int64_t i = 0; i < count; ++i) target[i] = static_cast<const float*>(data)[first + i];
      return;
    case DType::kBFloat16:
      for (int64_t i = 0; i < count; ++i) {
        const uint32_t bits = static_cast<const uint16_t*>(data)[first + i];
        target[i] = std::bit_cast<float>(bits << 16);
      }
      return;
    case DType::kFloat16:
      for (int64_t i = 0; i < count; ++i) {
        target[i] = DecodeFloat16(static_cast<const uint16_t*>(data)[first + i]);
      }
      return;
  }
}

void Store(DType dtype, void* data, int64_t index, double value) {
  switch (dtype) {
    case DType::kFloat32:
      static_cast<float*>(data)[index] = static_cast<float>(value);
      return;
    case DType::kBFloat16: {
      // A bf16 number is a float with a zero low half.
      const float rounded = static_cast<float>(RoundToFormat(kBFloat16Format, value));
      const uint32_t bits = std::bit_cast<uint32_t>(rounded) >> 16;
      static_cast<uint16_t*>(data)[index] =
          static_cast<uint16_t>(std::isnan(value) ? bits | 0x40 : bits);
      return;
    }
    case DType::kFloat16:
      static_cast<uint16_t*>(data)[index] = EncodeFloat16(RoundToFormat(kFloat16Format, value));
      return;
  }
}

double RoundTo(DType dtype, double value) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<float>(value);
    case DType::kBFloat16:
      return RoundToFormat(kBFloat16Format, value);
    case DType::kFloat16:
      return RoundToFormat(kFloat16Format, value);
  }
  return value;
}

double RoundToE4m3(double value) { return RoundToFormat(kE4m3Format, value); }

int64_t BytesOf(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

double ToleranceUnit(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 0x1p-20;
    case DType::kBFloat16:
      return 0x1p-9;
    case DType::kFloat16:
      return 0x1p-12;
  }
  return 0.0;
}

double SubnormalLoss(DType dtype, double value) {
  const double magnitude = std::abs(value);
  if (dtype != DType::kFloat16 || magnitude == 0.0 || magnitude >= 0x1p-14) return 0.0;
  return 0x1p-25;
}

double ResultLoss(DType dtype, double value) {
  return dtype == DType::kFloat16 && std::abs(value) < 0x1p-14 ? 0x1p-25 : 0.0;
}

double Float32Flush(double value) {
  const double magnitude = std::abs(value);
  if (magnitude == 0.0 || magnitude >= 0x1p-120) return 0.0;
  return std::max(magnitude, 0x1p-126);
}

}  // namespace ringattn::oracle
