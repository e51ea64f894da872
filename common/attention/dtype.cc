#include "common/attention/dtype.h"

#include <bit>
#include <cassert>
#include <cstring>

namespace ringattn {

int64_t ElementBytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

absl::string_view DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "fp32";
    case DType::kBFloat16:
      return "bf16";
    case DType::kFloat16:
      return "fp16";
  }
  assert(false && "unknown DType");
  return "";
}

std::optional<DType> DTypeFromName(absl::string_view name) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    if (name == DTypeName(dtype)) return dtype;
  }
  return std::nullopt;
}

float BFloat16ToFloat(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

uint16_t FloatToBFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  // A NaN with a payload only in the low half would round to infinity. Keep its sign and set the
  // quiet bit.
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x0040u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

float Float16ToFloat(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
  const uint32_t rest = bits & 0x7fffu;
  if (rest >= 0x7c00u) {  // infinity, NaN
    return std::bit_cast<float>(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
  }
  if (rest < 0x0400u) {  // zero, subnormal: rest units of 2^-24, exact in fp32
    const float magnitude = static_cast<float>(rest) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
  }
  return std::bit_cast<float>(sign | ((rest << 13) + (uint32_t{127 - 15} << 23)));
}

uint16_t FloatToFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  }
  // From 65520 (halfway between the largest fp16 and 2^16) on, ties to even round up to infinity.
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 0.5 aligns units of 2^-24 with the last bit of the sum, so the addition
    // itself rounds to nearest even.
    const float aligned = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(aligned) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0x0fffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - (uint32_t{127 - 15} << 23)) >> 13));
}

void ConvertToFloat(DType dtype, const void* source, float* target, int64_t count) {
  const auto* halves = static_cast<const uint16_t*>(source);
  switch (dtype) {
    case DType::kFloat32:
      if (count > 0) std::memcpy(target, source, static_cast<size_t>(count) * sizeof(float));
      return;
    case DType::kBFloat16:
      for (int64_t i = 0; i < count; ++i) target[i] = BFloat16ToFloat(halves[i]);
      return;
    case DType::kFloat16:
      for (int64_t i = 0; i < count; ++i) target[i] = Float16ToFloat(halves[i]);
      return;
  }
}

void ConvertFromFloat(DType dtype, const float* source, void* target, int64_t count) {
  auto* halves = static_cast<uint16_t*>(target);
  switch (dtype) {
    case DType::kFloat32:
      if (count > 0) std::memcpy(target, source, static_cast<size_t>(count) * sizeof(float));
      return;
    case DType::kBFloat16:
      for (int64_t i = 0; i < count; ++i) halves[i] = FloatToBFloat16(source[i]);
      return;
    case DType::kFloat16:
      for (int64_t i = 0; i < count; ++i) halves[i] = FloatToFloat16(source[i]);
      return;
  }
}

}  // namespace ringattn
