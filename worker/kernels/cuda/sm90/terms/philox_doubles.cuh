// Philox's rounds with the high halves of half of their products computed by the fp64 unit, which
// these kernels do not use otherwise. A 32-bit product with both halves (IMAD.WIDE) occupies the
// integer multipliers for four cycles of a warp, a product's lower half only for two.
//
// x is stored as the lower word of the double 2^84 + 2^32 x, whose upper word is the same for all
// x. With m = M 2^-32 and c = 2^84 - 2^52 M, both exact, the double times m plus c is 2^84 + x M.
// The fused multiply-add rounds once, towards zero. The lower word of the result is the product's
// upper half, and the upper word is unchanged. No word needs to be moved, although the assembler
// moves some.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_PHILOX_DOUBLES_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_PHILOX_DOUBLES_CUH_

#include "worker/kernels/cuda/plan/keep_bits.h"

namespace ringattn::worker::cuda::sm90 {

// A 32-bit number that the next round multiplies.
struct PhiloxFactor {
  static constexpr int kUpperWord = 0x45300000;  // of 2^84 and a little more
  double number;

  __device__ __forceinline__ static PhiloxFactor Of(uint32_t x) {
    return {__hiloint2double(kUpperWord, static_cast<int>(x))};
  }
  __device__ __forceinline__ uint32_t Value() const {
    return static_cast<uint32_t>(__double2loint(number));
  }
  // Returns another number with this number's upper word.
  __device__ __forceinline__ PhiloxFactor With(uint32_t x) const {
    return {__hiloint2double(__double2hiint(number), static_cast<int>(x))};
  }
  template <uint32_t kMultiplier>
  __device__ __forceinline__ PhiloxFactor HighOfProduct() const {
    constexpr double kScaled = kMultiplier * 0x1p-32;
    constexpr double kRest = ((uint64_t{1} << 32) - kMultiplier) * 0x1p52;
    return {__fma_rz(number, kScaled, kRest)};
  }
};

// The counters of a call between two of its rounds.
struct PhiloxRunning {
  PhiloxFactor x0;
  uint32_t x1;
  PhiloxFactor x2;
  uint32_t x3;

  __device__ __forceinline__ static PhiloxRunning Of(const PhiloxBlock& c) {
    return {PhiloxFactor::Of(c.x0), c.x1, PhiloxFactor::Of(c.x2), c.x3};
  }
  // Returns another call's counters with the upper words of this one.
  __device__ __forceinline__ PhiloxRunning Again(const PhiloxBlock& c) const {
    return {x0.With(c.x0), c.x1, x2.With(c.x2), c.x3};
  }
  __device__ __forceinline__ PhiloxBlock Block() const { return {x0.Value(), x1, x2.Value(), x3}; }
};

// x times the multiplier: `low` is the lower half; returns the upper half as a factor.
template <uint32_t kMultiplier>
__device__ __forceinline__ PhiloxFactor PhiloxByDoubles(const PhiloxFactor& x, uint32_t joined_a,
                                                        uint32_t joined_b, uint32_t& low) {
  const PhiloxFactor high = x.template HighOfProduct<kMultiplier>();
  low = x.Value() * kMultiplier;
  return high.With(high.Value() ^ joined_a ^ joined_b);
}
template <uint32_t kMultiplier>
__device__ __forceinline__ PhiloxFactor PhiloxByIntegers(const PhiloxFactor& x, uint32_t joined_a,
                                                         uint32_t joined_b, uint32_t& low) {
  const uint64_t product = uint64_t{x.Value()} * kMultiplier;
  low = LowHalf(product);
  return x.With(HighHalf(product) ^ joined_a ^ joined_b);
}

// One of the round's two products uses doubles and the other integers, so that neither unit waits
// for the other. If they alternate, the first product uses doubles in odd rounds and the second in
// even ones. A multiplied number then comes from the other unit, and its upper word is already in
// place.
template <bool kAlternates>
__device__ __forceinline__ PhiloxRunning PhiloxRoundOfDoubles(const PhiloxKeys& keys,
                                                              const PhiloxRunning& c, int round) {
  PhiloxRunning next;
  if (!kAlternates || round % 2 == 1) {
    next.x2 = PhiloxByDoubles<kPhiloxMultiplier0>(c.x0, c.x3, keys.second[round], next.x3);
    next.x0 = PhiloxByIntegers<kPhiloxMultiplier1>(c.x2, c.x1, keys.first[round], next.x1);
  } else {
    next.x2 = PhiloxByIntegers<kPhiloxMultiplier0>(c.x0, c.x3, keys.second[round], next.x3);
    next.x0 = PhiloxByDoubles<kPhiloxMultiplier1>(c.x2, c.x1, keys.first[round], next.x1);
  }
  return next;
}

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_PHILOX_DOUBLES_CUH_
