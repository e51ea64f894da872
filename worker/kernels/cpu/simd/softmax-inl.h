// The elementwise work between the products: online softmax and its gradient.
// Included once per SIMD target. `Store` says how weights become words.
#if defined(RINGATTN_WORKER_KERNELS_CPU_SIMD_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef RINGATTN_WORKER_KERNELS_CPU_SIMD_SOFTMAX_INL_H_
#undef RINGATTN_WORKER_KERNELS_CPU_SIMD_SOFTMAX_INL_H_
#else
#define RINGATTN_WORKER_KERNELS_CPU_SIMD_SOFTMAX_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <limits>

#include "hwy/highway.h"
#include "worker/kernels/cpu/simd/math-inl.h"
#include "worker/kernels/cpu/simd/tile_ops.h"

HWY_BEFORE_NAMESPACE();
namespace ringattn::worker::cpu::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

// One row's visible columns within [begin, end): whole vectors are
// [full_begin, full_end), the rest of [first, last) needs a mask.
struct RowSpan {
  int visible_begin, visible_end;  // clipped to the columns at hand
  int first, last;                 // vectors that hold a visible column
  int full_begin, full_end;        // vectors that hold only visible columns

  RowSpan(int begin, int end, int visible_from, int visible_to, int lanes) {
    visible_begin = std::max(begin, visible_from);
    visible_end = std::min(end, visible_to);
    if (visible_begin >= visible_end) visible_begin = visible_end = begin;
    first = visible_begin / lanes * lanes;
    last = (visible_end + lanes - 1) / lanes * lanes;
    if (visible_begin == visible_end) last = first;
    full_begin = std::min((visible_begin + lanes - 1) / lanes * lanes, last);
    full_end = std::max(visible_end / lanes * lanes, full_begin);
  }
};

template <class D>
HWY_INLINE hn::Mask<D> VisibleMask(D d, const RowSpan& span, int col) {
  const hn::RebindToSigned<D> di;
  const auto columns = hn::Iota(di, col);
  return hn::RebindMask(d, hn::And(hn::Gt(columns, hn::Set(di, span.visible_begin - 1)),
                                   hn::Lt(columns, hn::Set(di, span.visible_end))));
}

// tanh(inside_cap * q.k), in place.
template <class D>
HWY_INLINE void CapScores(D d, const ScoreScale& scale, float* scores, int begin, int end) {
  const auto inside = hn::Set(d, scale.inside_cap);
  const int lanes = static_cast<int>(hn::Lanes(d));
  for (int col = begin; col < end; col += lanes) {
    const auto raw = hn::LoadU(d, scores + col);
    hn::StoreU(Tanh(d, hn::Mul(raw, inside)), d, scores + col);
  }
}

// scores -= max over whole vectors of columns: of wide scores, what is left of them
// is exact where they are equal and small where they are close.
template <class D>
HWY_NOINLINE void SubtractMax(D d, float max, float* scores, int begin, int end) {
  const auto subtrahend = hn::Set(d, max);
  const int lanes = static_cast<int>(hn::Lanes(d));
  for (int col = begin; col < end; col += lanes) {
    hn::StoreU(hn::Sub(hn::LoadU(d, scores + col), subtrahend), d, scores + col);
  }
}

// Returns the power of 2 that the weights of a row with this maximum are relative to.
inline double WeightBase(float max, float to_log2) {
  const float scaled = max * to_log2;
  return IsWide(scaled) ? double{max} * to_log2 : double{scaled};
}

// The weights that are stored.
template <bool kKeeps, class D, class V = hn::Vec<D>>
HWY_INLINE V Kept(D d, V weights, const float* keeps, int col) {
  if constexpr (kKeeps) return hn::Mul(weights, hn::LoadU(d, keeps + col));
  return weights;
}

// The same where some columns have no factor, and a weight of 0.
template <bool kKeeps, class D, class M, class V = hn::Vec<D>>
HWY_INLINE V KeptVisible(D d, M visible, V weights, const float* keeps, int col) {
  if constexpr (kKeeps) return hn::IfThenElseZero(visible, Kept<true>(d, weights, keeps, col));
  return weights;
}

template <class Store, bool kKeeps>
void SoftmaxRows(const SoftmaxArgs& args) {
  const hn::ScalableTag<float> d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();
  const auto negative_infinity = hn::Set(d, kNegativeInfinity);
  const auto zero = hn::Zero(d);
  const float to_log2 = args.scale.to_log2;
  const auto scale = hn::Set(d, to_log2);
  for (int r = 0; r < args.rows; ++r) {
    float* scores = args.scores + r * args.scores_stride;
    float* weights = args.weights + r * args.weights_stride;
    const float* keeps = kKeeps ? args.keeps + r * args.scores_stride : nullptr;
    const RowSpan span(args.col_begin, args.col_end, args.visible_begin[r], args.visible_end[r],
                       lanes);
    if (args.scale.inside_cap != 0.0f) CapScores(d, args.scale, scores, span.first, span.last);

    auto max0 = negative_infinity;
    auto max1 = negative_infinity;
    for (int col = span.first; col < span.full_begin; col += lanes) {
      max0 = hn::Max(max0, hn::IfThenElse(VisibleMask(d, span, col), hn::LoadU(d, scores + col),
                                          negative_infinity));
    }
    int col = span.full_begin;
    for (; col + 2 * lanes <= span.full_end; col += 2 * lanes) {
      max0 = hn::Max(max0, hn::LoadU(d, scores + col));
      max1 = hn::Max(max1, hn::LoadU(d, scores + col + lanes));
    }
    for (; col < span.full_end; col += lanes) max1 = hn::Max(max1, hn::LoadU(d, scores + col));
    for (; col < span.last; col += lanes) {
      max0 = hn::Max(max0, hn::IfThenElse(VisibleMask(d, span, col), hn::LoadU(d, scores + col),
                                          negative_infinity));
    }
    const float tile_max = hn::GetLane(hn::MaxOfLanes(d, hn::Max(max0, max1)));
    const float old_max = args.row_max[r];
    const float new_max = tile_max > old_max ? tile_max : old_max;
    // A row whose products are all -inf would subtract -inf from itself.
    float shift = new_max == kNegativeInfinity ? 0.0f : new_max * to_log2;
    const bool wide = IsWide(shift);
    float correction = 1.0f;
    if (old_max == kNegativeInfinity) {
      correction = 0.0f;
    } else if (old_max != new_max && (wide || IsWide(old_max * to_log2))) {
      correction = std::exp2(
          static_cast<float>(WeightBase(old_max, to_log2) - WeightBase(new_max, to_log2)));
    } else if (old_max != new_max) {
      correction = hn::GetLane(Exp2(d, hn::Set(d, old_max * to_log2 - shift)));
    }
    if (wide) {
      SubtractMax(d, new_max, scores, span.first, span.last);
      shift = 0.0f;
    }
    const auto minus_max = hn::Set(d, -shift);

    auto sum0 = zero;
    auto sum1 = zero;
    for (int c = args.col_begin; c < span.first; c += lanes) Store::One(d, zero, weights, c);
    for (col = span.first; col < span.full_begin; col += lanes) {
      const auto p = Exp2(d, hn::MulAdd(hn::LoadU(d, scores + col), scale, minus_max));
      const auto visible = VisibleMask(d, span, col);
      const auto kept = hn::IfThenElseZero(visible, p);
      sum0 = hn::Add(sum0, kept);
      Store::One(d, KeptVisible<kKeeps>(d, visible, kept, keeps, col), weights, col);
    }
    for (; col + 2 * lanes <= span.full_end; col += 2 * lanes) {
      const auto p0 = Exp2(d, hn::MulAdd(hn::LoadU(d, scores + col), scale, minus_max));
      const auto p1 = Exp2(d, hn::MulAdd(hn::LoadU(d, scores + col + lanes), scale, minus_max));
      sum0 = hn::Add(sum0, p0);
      sum1 = hn::Add(sum1, p1);
      Store::Two(d, Kept<kKeeps>(d, p0, keeps, col), Kept<kKeeps>(d, p1, keeps, col + lanes),
                 weights, col);
    }
    for (; col < span.last; col += lanes) {
      const auto p = Exp2(d, hn::MulAdd(hn::LoadU(d, scores + col), scale, minus_max));
      const auto visible = VisibleMask(d, span, col);
      const auto kept = hn::IfThenElseZero(visible, p);
      sum0 = hn::Add(sum0, kept);
      Store::One(d, KeptVisible<kKeeps>(d, visible, kept, keeps, col), weights, col);
    }
    for (; col < args.col_end; col += lanes) Store::One(d, zero, weights, col);

    const float sum = hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1)));
    args.row_sum[r] = args.row_sum[r] * correction + sum;
    args.row_max[r] = new_max;
    args.correction[r] = correction;
  }
}

template <class Store>
void Softmax(const SoftmaxArgs& args) {
  if (args.keeps != nullptr) return SoftmaxRows<Store, true>(args);
  SoftmaxRows<Store, false>(args);
}

// The value as fp32 holds it: compilers may join a product and a sum into one operation
// that rounds once.
template <class V>
HWY_INLINE V Rounded(V value) {
  asm volatile("" : "+m"(value.raw));
  return value;
}

// Whether p of a row takes the path for wide scores; false where its lse is not finite.
inline bool HasWideScores(const GradientArgs& args, int row) {
  return IsWide(args.lse[row]) && std::isfinite(args.lse[row]);
}

// p and ds of one vector of columns of one row. wide: HasWideScores of the row.
template <bool kTerms, class D, class V = hn::Vec<D>>
HWY_INLINE void GradientOf(D d, const GradientArgs& args, const RowSpan& span, bool wide, int row,
                           int col, V& p, V& ds) {
  const int64_t at = row * args.stride + col;
  const V raw = hn::LoadU(d, args.scores + at);
  const V dp = hn::LoadU(d, args.dp + at);
  // Large scores and lse cancel before anything is rounded, but for wide ones: there lse
  // has been rounded, and only a score rounded like it gives a row's only key p = 1.
  const auto exponent = [&](V raw_score) HWY_ATTR {
    const V natural = hn::Set(d, args.scale.natural);
    if (HWY_UNLIKELY(wide)) {
      const V score = Rounded(hn::Mul(raw_score, natural));
      return hn::Min(hn::Zero(d), hn::Sub(score, hn::Set(d, args.lse[row])));
    }
    return hn::MulAdd(raw_score, natural, hn::Set(d, -args.lse[row]));
  };
  const V delta = hn::Set(d, args.delta[row]);
  const V log2e = hn::Set(d, 1.44269504f);
  if constexpr (kTerms) {
    const V weight = Exp2(d, hn::Mul(exponent(raw), log2e));
    const V one = hn::Set(d, 1.0f);
    const V keep = args.keeps != nullptr ? hn::LoadU(d, args.keeps + at) : one;
    const V slope = args.slopes != nullptr ? hn::LoadU(d, args.slopes + at) : one;
    const auto hidden = hn::Eq(raw, hn::Set(d, -std::numeric_limits<float>::infinity()));
    p = hn::IfThenZeroElse(hidden, hn::Mul(weight, keep));
    const V change = hn::Sub(hn::Mul(dp, keep), delta);
    ds = hn::IfThenZeroElse(hidden, hn::Mul(hn::Mul(weight, change), slope));
  } else if (args.scale.inside_cap != 0.0f) {
    const V t = Tanh(d, hn::Mul(raw, hn::Set(d, args.scale.inside_cap)));
    p = Exp2(d, hn::Mul(exponent(t), log2e));
    ds = hn::Mul(hn::Mul(p, hn::Sub(dp, delta)), hn::NegMulAdd(t, t, hn::Set(d, 1.0f)));
  } else {
    p = Exp2(d, hn::Mul(exponent(raw), log2e));
    ds = hn::Mul(p, hn::Sub(dp, delta));
  }
  if (col < span.full_begin || col >= span.full_end) {
    const auto visible = VisibleMask(d, span, col);
    p = hn::IfThenElseZero(visible, p);
    ds = hn::IfThenElseZero(visible, ds);
  }
}

}  // namespace
}  // namespace ringattn::worker::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
