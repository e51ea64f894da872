// Rules for the classes of pairs of tiles (terms_params.h), empty or full, and the assignment of a
// mask's bits to the threads that hold its scores. Pure functions for host and device.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_PAIR_RULES_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_PAIR_RULES_H_

#include <cstdint>

#include "worker/kernels/cuda/sm90/terms/terms_params.h"

namespace ringattn::worker::cuda::sm90 {

// The segments of some tokens: the span of the nonnegative ids, and whether some ids are negative.
// Tokens with negative ids see no token.
struct IdSpan {
  int32_t low = 0x7fffffff;
  int32_t high = -1;
  bool blind = false;

  constexpr void Add(int32_t id) {
    if (id < 0) {
      blind = true;
      return;
    }
    low = id < low ? id : low;
    high = id > high ? id : high;
  }
  constexpr bool OneSegment() const { return !blind && low == high; }
  // Returns the class of the pair of these tokens with `other`.
  constexpr uint8_t Beside(const IdSpan& other) const {
    const int32_t first = low > other.low ? low : other.low;
    const int32_t last = high < other.high ? high : other.high;
    if (first > last) return 0;
    return OneSegment() && other.OneSegment() ? kPairSeen : kPairSeen | kPairChecked;
  }
};

// Returns the class by a mask in which some, or all, pairs of tokens are set.
constexpr uint8_t MaskClass(bool some, bool all) {
  return !some ? 0 : all ? kPairSeen : kPairSeen | kPairChecked;
}

// Returns the bits of those 32 columns from `first` on that are below `columns`.
constexpr uint32_t ColumnsBelow(int first, int columns) {
  const int count = columns - first;
  return count <= 0 ? 0 : count >= 32 ? 0xffffffff : (1u << count) - 1;
}

// Returns the bits of columns 8 m + 2 q + i out of 32, at 2 m + i.
constexpr uint32_t PairsOf(uint32_t word, int q) {
  const uint32_t x = word >> (2 * q) & 0x03030303;
  return (x | x >> 6 | x >> 12 | x >> 18) & 0xff;
}

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_PAIR_RULES_H_
