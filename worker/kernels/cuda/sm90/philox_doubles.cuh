// Philox's rounds with the high halves of their products by the unit of doubles, which these
// kernels have no other use for: a 32-bit product with both halves (IMAD.WIDE) holds the
// multipliers of integers for four cycles of a warp, one of its lower half for two.
//
// x lies as the lower word of 2^84 + 2^32 x, whose upper word is the same for all x. With
// m = M 2^-32 and c = 2^84 - 2^52 M, both exact, m times that and c are 2^84 + x M: rounded towards
// zero, once, by the fused multiply-add, its lower word is the product's upper half, and its upper
// word is what it was: no word need be moved, though the assembler moves some.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_PHILOX_DOUBLES_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_PHILOX_DOUBLES_CUH_

#include "worker/kernels/cuda/keep_bits.h"

namespace ringattn::worker::cuda::sm90 {

// A 32-bit number that is multiplied next.
struct PhiloxFactor {
  static constexpr int kUpperWord = 0x45300000;  // of 2^84 and a little more
  double number;

  __device__ __forceinline__ static PhiloxFactor Of(uint32_t x) {
    return {__hiloint2double(kUpperWord, static_cast<int>(x))};
  }
  __device__ __forceinline__ uint32_t Value() const {
    return static_cast<uint32_t>(__double2loint(number));
  }
  // Its place taken by another number.
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
  __device__ __forceinline__ PhiloxBlock Block() const { return {x0.Value(), x1, x2.Value(), x3}; }
};

// The first product's upper half by doubles, the second product as ever: then neither unit waits
// for the other.
__device__ __forceinline__ PhiloxRunning PhiloxRoundOfDoubles(const PhiloxKeys& keys,
                                                              const PhiloxRunning& c, int round) {
  PhiloxRunning next;
  const uint32_t joined_second = c.x3 ^ keys.second[round];
  const PhiloxFactor high = c.x0.HighOfProduct<kPhiloxMultiplier0>();
  next.x3 = c.x0.Value() * kPhiloxMultiplier0;
  next.x2 = high.With(high.Value() ^ joined_second);
  const uint32_t joined_first = c.x1 ^ keys.first[round];
  const uint64_t product = uint64_t{c.x2.Value()} * kPhiloxMultiplier1;
  next.x1 = LowHalf(product);
  next.x0 = c.x2.With(HighHalf(product) ^ joined_first);
  return next;
}

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_PHILOX_DOUBLES_CUH_
