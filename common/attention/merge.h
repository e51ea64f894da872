// The merge of two partial results over disjoint sets of keys. All code that combines partials
// (ring steps, split keys) uses this definition. Vectorised and GPU versions repeat it and are
// tested against it.
//
//   m = max(l1, l2);  w1 = exp(l1 - m), w2 = exp(l2 - m), 0 where l = -inf
//   o = (w1 o1 + w2 o2) / (w1 + w2);  l = m + ln(w1 + w2)
//   both -inf: (0, -inf)
//
// For finite values equivalent to o <- o - sigmoid(l2 - l1) (o - o2), the form that the ring flash
// attention literature uses. Associative up to rounding.
#ifndef RINGATTN_COMMON_ATTENTION_MERGE_H_
#define RINGATTN_COMMON_ATTENTION_MERGE_H_

#include <cmath>
#include <limits>

namespace ringattn {

// The weights of the two outputs, and the merged lse (natural log).
struct MergeWeights {
  float first = 0.0f;
  float second = 0.0f;
  float lse = -std::numeric_limits<float>::infinity();
};

// A NaN in either lse gives a NaN result, so NaN inputs stay visible.
inline MergeWeights MergeLse(float lse_first, float lse_second) {
  constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();
  if (lse_first == kNegativeInfinity && lse_second == kNegativeInfinity) return {};
  const float max = lse_first > lse_second || std::isnan(lse_first) ? lse_first : lse_second;
  const float first = std::exp(lse_first - max);
  const float second = std::exp(lse_second - max);
  const float sum = first + second;
  return {first / sum, second / sum, max + std::log(sum)};
}

}  // namespace ringattn

#endif  // RINGATTN_COMMON_ATTENTION_MERGE_H_
