// The rounding of a forward in e4m3 (AttentionProblem::compute), for kernels that compute it in
// other types. e4m3 has four significant bits. Its smallest normal is 2^-6, its smallest number
// 2^-9 and its largest 448. It has no infinities and, here, no overflow.
//
// For each of q, k and v, and for every batch row and K/V head (for q: all query heads that share
// it), a call takes the largest finite |x| of the rows that are in spans, and rounds
//   x  to  RoundToE4m3(x / 2^e) * 2^e,  e = ScaleExponent(largest)
// where NaN and infinities become NaN. RoundProbability rounds probabilities, which are relative to
// the row's largest score so far. Their sums, by which results are divided, use the values before
// rounding.
#ifndef RINGATTN_WORKER_KERNELS_E4M3_H_
#define RINGATTN_WORKER_KERNELS_E4M3_H_

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace ringattn::worker {

inline constexpr float kE4m3Max = 448.0f;
// Lower limit: with smaller scales, reciprocals and products could leave the range of fp32.
inline constexpr int kE4m3MinExponent = -100;
// log2 of the factor of probabilities, which makes more of the small ones normal.
inline constexpr int kE4m3ProbabilityExponent = 8;

// Returns the smallest e with largest <= 448 * 2^e. `largest` must be finite and not negative.
inline int ScaleExponent(float largest) {
  int exponent;
  const float fraction = std::frexp(largest, &exponent);  // [0.5, 1)
  if (fraction == 0.0f) return 0;
  exponent -= fraction <= kE4m3Max / 512.0f ? 9 : 8;
  return exponent < kE4m3MinExponent ? kE4m3MinExponent : exponent;
}

// Rounds to nearest, ties to even. REQUIRES: |x| <= 448 or x is not finite, which gives NaN.
inline float RoundToE4m3(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const float size = std::bit_cast<float>(bits & 0x7fffffffu);
  if (!(size <= std::numeric_limits<float>::max())) return std::numeric_limits<float>::quiet_NaN();
  // Normals lose 20 of the 23 fraction bits; below 2^-6 the step is 2^-9.
  const uint32_t kept = (bits + 0x7ffffu + (bits >> 20 & 1u)) & ~0xfffffu;
  constexpr float kMagic = 0x1.8p14f;  // its last place is 2^-9
  const float tiny = (x + kMagic) - kMagic;
  return size >= 0x1p-6f ? std::bit_cast<float>(kept) : tiny;
}

// REQUIRES: 0 <= p <= 1, or NaN.
inline float RoundProbability(float p) {
  constexpr float kScale = 1 << kE4m3ProbabilityExponent;
  return RoundToE4m3(p * kScale) / kScale;
}

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_KERNELS_E4M3_H_
