// What a forward in e4m3 rounds (AttentionProblem::compute), for kernels that compute it in other
// types. e4m3: four significant bits, 2^-6 the smallest normal, 2^-9 the smallest number, 448 the
// largest; neither infinities nor, here, overflow.
//
// Of each of q, k and v, for every batch row and kv head (of q: all query heads that share it), a
// call takes the largest finite |x| of its rows that are in pieces, and rounds
//   x  to  RoundToE4m3(x / 2^e) * 2^e,  e = ScaleExponent(largest)
// where NaN and infinities become NaN. Probabilities, relative to the row's largest score so far,
// are rounded as RoundProbability; the sums that they are divided by are of those before rounding.
#ifndef RINGATTN_WORKER_KERNELS_E4M3_H_
#define RINGATTN_WORKER_KERNELS_E4M3_H_

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace ringattn::worker {

inline constexpr float kE4m3Max = 448.0f;
// Smaller scales, whose reciprocals and products could leave fp32, have no use.
inline constexpr int kE4m3MinExponent = -100;
// log2 of what probabilities are multiplied with, so that more of the small ones are normal.
inline constexpr int kE4m3ProbabilityExponent = 8;

// The smallest e with largest <= 448 * 2^e. `largest` is finite and not negative.
inline int ScaleExponent(float largest) {
  int exponent;
  const float fraction = std::frexp(largest, &exponent);  // [0.5, 1)
  if (fraction == 0.0f) return 0;
  exponent -= fraction <= kE4m3Max / 512.0f ? 9 : 8;
  return exponent < kE4m3MinExponent ? kE4m3MinExponent : exponent;
}

// Nearest, ties to even. REQUIRES: |x| <= 448, or not finite: then NaN.
inline float RoundToE4m3(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const float size = std::bit_cast<float>(bits & 0x7fffffffu);
  if (!(size <= std::numeric_limits<float>::max())) return std::numeric_limits<float>::quiet_NaN();
  // Of normals 20 of the 23 fraction bits go; below 2^-6 steps are 2^-9.
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
