// Loads of any element type as fp32 vectors. Included once per SIMD target.
#if defined(RINGATTN_WORKER_KERNELS_CPU_SIMD_CONVERT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef RINGATTN_WORKER_KERNELS_CPU_SIMD_CONVERT_INL_H_
#undef RINGATTN_WORKER_KERNELS_CPU_SIMD_CONVERT_INL_H_
#else
#define RINGATTN_WORKER_KERNELS_CPU_SIMD_CONVERT_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "common/attention/dtype.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ringattn::worker::cpu::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

template <class D>
HWY_INLINE hn::Vec<D> LoadAsFloat(D d, const float* in) {
  return hn::LoadU(d, in);
}

// A bf16 is the upper half of an fp32. (Highway's own bf16 loads do not exist
// for its scalar target.)
template <class D>
HWY_INLINE hn::Vec<D> LoadAsFloat(D d, const hwy::bfloat16_t* in) {
  const hn::RebindToUnsigned<D> du32;
  const hn::Rebind<uint16_t, D> du16;
  const auto bits = hn::LoadU(du16, reinterpret_cast<const uint16_t*>(in));
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du32, bits)));
}

template <class D>
HWY_INLINE hn::Vec<D> LoadAsFloat(D d, const hwy::float16_t* in) {
#if HWY_TARGET == HWY_SCALAR
  uint16_t bits;
  std::memcpy(&bits, in, sizeof(bits));
  return hn::Set(d, Float16ToFloat(bits));
#else
  const hn::Rebind<hwy::float16_t, D> df16;
  return hn::PromoteTo(d, hn::LoadU(df16, in));
#endif
}

// Returns the first `count` elements (count < lanes), followed by zeros; reads no further.
template <class D, typename T>
HWY_INLINE hn::Vec<D> LoadFirstAsFloat(D d, const T* in, int count) {
  alignas(64) T whole[hn::MaxLanes(D())] = {};
  std::memcpy(whole, in, sizeof(T) * std::max(count, 0));
  return LoadAsFloat(d, whole);
}

}  // namespace
}  // namespace ringattn::worker::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
