// Vector exp2 and tanh. Included once per SIMD target (see tile_ops_f32.cc).
#if defined(RINGATTN_WORKER_KERNELS_CPU_SIMD_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef RINGATTN_WORKER_KERNELS_CPU_SIMD_MATH_INL_H_
#undef RINGATTN_WORKER_KERNELS_CPU_SIMD_MATH_INL_H_
#else
#define RINGATTN_WORKER_KERNELS_CPU_SIMD_MATH_INL_H_
#endif

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ringattn::worker::cpu::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

// 2^r for r in [0, 1): minimax polynomial of degree 5, relative error 8.3e-8,
// exactly 1 at 0.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Exp2Fraction(D d, V r) {
  V p = hn::Set(d, 0.00186713008191f);
  p = hn::MulAdd(p, r, hn::Set(d, 0.00901703028444f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.055799913146f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.240164450136f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.693151311808f));
  return hn::MulAdd(p, r, hn::Set(d, 1.0f));
}

// 2^x, ~2 ulp; 0 below 2^-126, +inf from 2^128 on; NaN stays NaN.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Exp2(D d, V x) {
#if HWY_TARGET == HWY_AVX3
  const V fraction{_mm512_reduce_ps(x.raw, 0x09)};  // x - floor(x), no exceptions
  return V{_mm512_scalef_ps(Exp2Fraction(d, fraction).raw, x.raw)};
#else
  const hn::RebindToSigned<D> di;
  const V low = hn::Set(d, -127.0f);
  const V high = hn::Set(d, 128.0f);
  // Selected this way round NaN passes through.
  x = hn::IfThenElse(hn::Lt(x, low), low, x);
  x = hn::IfThenElse(hn::Gt(x, high), high, x);
  const V whole = hn::Floor(x);
  const V p = Exp2Fraction(d, hn::Sub(x, whole));
  const auto exponent = hn::Add(hn::ConvertTo(di, whole), hn::Set(di, 127));
  return hn::Mul(p, hn::BitCast(d, hn::ShiftLeft<23>(exponent)));
#endif
}

// tanh, relative error below 3e-7. Near 0 the odd polynomial of Cephes' tanhf,
// elsewhere 1 - 2 / (exp(2x) + 1).
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Tanh(D d, V x) {
  const V magnitude = hn::Abs(x);
  const V z = hn::Mul(x, x);
  V p = hn::Set(d, -5.70498872745e-3f);
  p = hn::MulAdd(p, z, hn::Set(d, 2.06390887954e-2f));
  p = hn::MulAdd(p, z, hn::Set(d, -5.37397155531e-2f));
  p = hn::MulAdd(p, z, hn::Set(d, 1.33314422036e-1f));
  p = hn::MulAdd(p, z, hn::Set(d, -3.33332819422e-1f));
  const V near_zero = hn::MulAdd(hn::Mul(p, z), magnitude, magnitude);
  const V one = hn::Set(d, 1.0f);
  const V exp = Exp2(d, hn::Mul(magnitude, hn::Set(d, 2.88539008178f)));  // 2 log2(e)
  const V far = hn::Sub(one, hn::Div(hn::Set(d, 2.0f), hn::Add(exp, one)));
  const V result = hn::IfThenElse(hn::Lt(magnitude, hn::Set(d, 0.625f)), near_zero, far);
  return hn::CopySign(result, x);
}

}  // namespace
}  // namespace ringattn::worker::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
