#include "worker/kernels/cpu/simd/elementwise.h"

#include <algorithm>
#include <cstring>

#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "worker/kernels/cpu/simd/elementwise.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "worker/kernels/cpu/simd/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ringattn::worker::cpu::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;

// Vectors of bf16 from fp32; the scalar conversion serves the tail.
int64_t ConvertVectorsToBf16(const float* source, uint16_t* target, int64_t count) {
  const FloatTag d;
  const hn::RebindToUnsigned<FloatTag> du;
  const hn::RebindToSigned<FloatTag> di;
  const hn::Rebind<uint16_t, FloatTag> du16;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto value = hn::LoadU(d, source + i);
    const auto bits = hn::BitCast(du, value);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
    const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7fff))));
    const auto quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(du, 0x40));
    const auto is_nan = hn::RebindMask(du, hn::IsNaN(value));
    const auto result = hn::IfThenElse(is_nan, quiet, rounded);
    hn::StoreU(hn::DemoteTo(du16, hn::BitCast(di, result)), du16, target + i);
  }
  return i;
}

int64_t ConvertVectorsToFp16(const float* source, uint16_t* target, int64_t count) {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
  const FloatTag d;
  const hn::Rebind<hwy::float16_t, FloatTag> df16;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    hn::StoreU(hn::DemoteTo(df16, hn::LoadU(d, source + i)), df16,
               reinterpret_cast<hwy::float16_t*>(target) + i);
  }
  return i;
#else
  return 0;  // elsewhere Highway's conversion does not promise to round to nearest
#endif
}

void AddScaledVectors(float factor, const float* source, float* target, int64_t count) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto f = hn::Set(d, factor);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto sum = hn::MulAdd(f, hn::LoadU(d, source + i), hn::LoadU(d, target + i));
    hn::StoreU(sum, d, target + i);
  }
  for (; i < count; ++i) target[i] += factor * source[i];
}

template <typename T>
float DotOf(const T* a, const T* b, int64_t count) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  auto sum = hn::Zero(d);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    sum = hn::MulAdd(LoadAsFloat(d, a + i), LoadAsFloat(d, b + i), sum);
  }
  const int rest = static_cast<int>(count - i);
  if (rest > 0) {
    sum = hn::MulAdd(LoadFirstAsFloat(d, a + i, rest), LoadFirstAsFloat(d, b + i, rest), sum);
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

float DotOfType(DType dtype, const void* a, const void* b, int64_t count) {
  switch (dtype) {
    case DType::kFloat32:
      return DotOf(static_cast<const float*>(a), static_cast<const float*>(b), count);
    case DType::kBFloat16:
      return DotOf(static_cast<const hwy::bfloat16_t*>(a), static_cast<const hwy::bfloat16_t*>(b),
                   count);
    case DType::kFloat16:
      return DotOf(static_cast<const hwy::float16_t*>(a), static_cast<const hwy::float16_t*>(b),
                   count);
  }
  return 0.0f;
}

// Returns the maximum of the magnitudes' bits, which order like numbers, with infinity and NaN
// above.
template <typename T>
float MaxMagnitudeOf(const SourceRows& source) {
  const FloatTag d;
  const hn::RebindToSigned<FloatTag> di;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const auto no_sign = hn::Set(di, 0x7fffffff);
  auto largest = hn::Zero(di);
  for (int r = 0; r < source.rows; ++r) {
    const T* in = static_cast<const T*>(source.data) + source.RowOffset(r);
    for (int col = 0; col < source.cols; col += lanes) {
      const int left = source.cols - col;
      const auto v = left >= lanes ? LoadAsFloat(d, in + col) : LoadFirstAsFloat(d, in + col, left);
      largest = hn::Max(largest, hn::And(hn::BitCast(di, v), no_sign));
    }
  }
  alignas(64) int32_t bits[hn::MaxLanes(FloatTag())];
  hn::Store(largest, di, bits);
  const int32_t most = *std::max_element(bits, bits + lanes);
  float magnitude;
  std::memcpy(&magnitude, &most, sizeof(magnitude));
  return magnitude;
}

float MaxMagnitudeOfType(const SourceRows& source) {
  switch (source.dtype) {
    case DType::kFloat32:
      return MaxMagnitudeOf<float>(source);
    case DType::kBFloat16:
      return MaxMagnitudeOf<hwy::bfloat16_t>(source);
    case DType::kFloat16:
      return MaxMagnitudeOf<hwy::float16_t>(source);
  }
  return 0.0f;
}

void CombineVectors(float first_weight, const float* first, float second_weight,
                    const float* second, float* target, int64_t count) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto w1 = hn::Set(d, first_weight);
  const auto w2 = hn::Set(d, second_weight);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    hn::StoreU(hn::MulAdd(w1, hn::LoadU(d, first + i), hn::Mul(w2, hn::LoadU(d, second + i))), d,
               target + i);
  }
  for (; i < count; ++i) target[i] = first_weight * first[i] + second_weight * second[i];
}

void ScaleVectors(float weight, const float* source, float* target, int64_t count) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto w = hn::Set(d, weight);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    hn::StoreU(hn::Mul(w, hn::LoadU(d, source + i)), d, target + i);
  }
  for (; i < count; ++i) target[i] = weight * source[i];
}

}  // namespace
}  // namespace ringattn::worker::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ringattn::worker::cpu {

HWY_EXPORT(ConvertVectorsToBf16);
HWY_EXPORT(ConvertVectorsToFp16);
HWY_EXPORT(AddScaledVectors);
HWY_EXPORT(DotOfType);
HWY_EXPORT(MaxMagnitudeOfType);
HWY_EXPORT(CombineVectors);
HWY_EXPORT(ScaleVectors);

void Convert(DType dtype, const float* source, void* target, int64_t count) {
  int64_t done = 0;
  switch (dtype) {
    case DType::kFloat32:
      if (target != source && count > 0) {
        std::memcpy(target, source, static_cast<size_t>(count) * sizeof(float));
      }
      return;
    case DType::kBFloat16:
      done =
          HWY_DYNAMIC_DISPATCH(ConvertVectorsToBf16)(source, static_cast<uint16_t*>(target), count);
      break;
    case DType::kFloat16:
      done =
          HWY_DYNAMIC_DISPATCH(ConvertVectorsToFp16)(source, static_cast<uint16_t*>(target), count);
      break;
  }
  ConvertFromFloat(dtype, source + done, static_cast<uint16_t*>(target) + done, count - done);
}

void AddScaled(float factor, const float* source, float* target, int64_t count) {
  HWY_DYNAMIC_DISPATCH(AddScaledVectors)(factor, source, target, count);
}

float Dot(DType dtype, const void* a, const void* b, int64_t count) {
  return HWY_DYNAMIC_DISPATCH(DotOfType)(dtype, a, b, count);
}

float MaxMagnitude(const SourceRows& source) {
  return HWY_DYNAMIC_DISPATCH(MaxMagnitudeOfType)(source);
}

void Combine(float first_weight, const float* first, float second_weight, const float* second,
             float* target, int64_t count) {
  HWY_DYNAMIC_DISPATCH(CombineVectors)(first_weight, first, second_weight, second, target, count);
}

void Scale(float weight, const float* source, float* target, int64_t count) {
  HWY_DYNAMIC_DISPATCH(ScaleVectors)(weight, source, target, count);
}

}  // namespace ringattn::worker::cpu
#endif  // HWY_ONCE
