// The merge: how two partial results over disjoint sets of keys become one.
// Every place that combines partials (ring steps, split keys) uses this
// definition; vectorised and GPU versions mirror it and are tested against it.
//
//   m = max(l1, l2);  w1 = exp(l1 - m), w2 = exp(l2 - m), 0 where l = -inf
//   o = (w1 o1 + w2 o2) / (w1 + w2);  l = m + ln(w1 + w2)
//   both -inf: (0, -inf)
//
// Equivalent where finite to o <- o - sigmoid(l2 - l1) (o - o2), the form used
// by the ring flash attention literature. Associative up to rounding.
#ifndef RINGATTN_COMMON_ATTENTION_MERGE_H_
#define RINGATTN_COMMON_ATTENTION_MERGE_H_

#include <cmath>
#include <limits>

namespace ringattn {

// The weights that the two outputs get, and the merged lse (natural log).
struct MergeWeights {
  float first = 0.0f;
  float second = 0.0f;
  float lse = -std::numeric_limits<float>::infinity();
};

// NaN in either lse makes the result NaN: an input's NaN is shown, never hidden.
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
