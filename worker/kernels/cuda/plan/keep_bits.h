// Dropout's keep bits in the register layouts of tensor-core scores. docs/semantics.md defines the
// bits of a pair and philox.h computes them. Pure functions for host and device.
//
// One Philox call covers eight keys of a query. A forward's thread uses all eight if its range
// begins at an even key. An offset of the range mod 32 costs one more call (five for 128 keys
// instead of four), so that ranges need no alignment for dropout.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PLAN_KEEP_BITS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PLAN_KEEP_BITS_H_

#include <cstdint>

#include "worker/kernels/philox.h"

namespace ringattn::worker::cuda {

// The keys of Philox's rounds, computed once per call.
struct PhiloxKeys {
  uint32_t first[kPhiloxRounds] = {};
  uint32_t second[kPhiloxRounds] = {};

  constexpr PhiloxKeys() = default;
  constexpr PhiloxKeys(uint32_t key0, uint32_t key1) {
    for (uint32_t round = 0; round < kPhiloxRounds; ++round) {
      first[round] = key0 + round * kPhiloxWeyl0;
      second[round] = key1 + round * kPhiloxWeyl1;
    }
  }
};

// Philox of (counter, row, head, batch) begins with products that depend only on the row or only on
// the counter. The first two rounds and half of the third are computed once for all counters that
// meet a row and once for all rows that meet a counter. A call then takes 15 of 20 products.
struct PhiloxRowPart {
  uint32_t high = 0, low = 0;  // of the second round's product
};
struct PhiloxCounterPart {
  uint32_t x0, x2;        // combined with the row's high half and the results from it
  uint32_t next2, next3;  // the third round's results, without the row's low half
};

constexpr uint32_t HighHalf(uint64_t x) { return static_cast<uint32_t>(x >> 32); }
constexpr uint32_t LowHalf(uint64_t x) { return static_cast<uint32_t>(x); }

constexpr PhiloxRowPart RowPartOf(const PhiloxKeys& keys, uint32_t row, uint32_t head) {
  const uint32_t x0 = HighHalf(uint64_t{kPhiloxMultiplier1} * head) ^ row ^ keys.first[0];
  const uint64_t a = uint64_t{kPhiloxMultiplier0} * x0;
  return {HighHalf(a), LowHalf(a)};
}

constexpr PhiloxCounterPart CounterPartOf(const PhiloxKeys& keys, uint32_t counter, uint32_t head,
                                          uint32_t batch) {
  const uint64_t a = uint64_t{kPhiloxMultiplier0} * counter;
  const uint32_t x2 = HighHalf(a) ^ batch ^ keys.second[0];
  const uint64_t b = uint64_t{kPhiloxMultiplier1} * x2;
  const uint32_t x0 = HighHalf(b) ^ LowHalf(uint64_t{kPhiloxMultiplier1} * head) ^ keys.first[1];
  const uint64_t c = uint64_t{kPhiloxMultiplier0} * x0;
  return {LowHalf(b) ^ keys.first[2], LowHalf(a) ^ keys.second[1], HighHalf(c) ^ keys.second[2],
          LowHalf(c)};
}

// JoinPhilox computes the first three rounds from both parts. The functions after it compute one of
// the other rounds, and all of them.
inline constexpr int kPhiloxJoined = 3;
constexpr PhiloxBlock JoinPhilox(const PhiloxRowPart& row, const PhiloxCounterPart& counter) {
  const uint64_t third = uint64_t{kPhiloxMultiplier1} * (row.high ^ counter.x2);
  return {HighHalf(third) ^ counter.x0, LowHalf(third), counter.next2 ^ row.low, counter.next3};
}
constexpr PhiloxBlock PhiloxRound(const PhiloxKeys& keys, const PhiloxBlock& c, int round) {
  const uint64_t a = uint64_t{kPhiloxMultiplier0} * c.x0;
  const uint64_t b = uint64_t{kPhiloxMultiplier1} * c.x2;
  return {HighHalf(b) ^ c.x1 ^ keys.first[round], LowHalf(b),
          HighHalf(a) ^ c.x3 ^ keys.second[round], LowHalf(a)};
}
constexpr PhiloxBlock PhiloxOf(const PhiloxKeys& keys, const PhiloxRowPart& row,
                               const PhiloxCounterPart& counter) {
  PhiloxBlock c = JoinPhilox(row, counter);
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int round = kPhiloxJoined; round < kPhiloxRounds; ++round) c = PhiloxRound(keys, c, round);
  return c;
}

// Returns whether the upper lane of a part is kept. For the lower lane, pass the part times 2^16.
// `threshold` is below 2^16.
constexpr bool KeepsUpper(uint32_t part, uint32_t threshold) { return part >= threshold << 16; }

// Bits 2 p and 2 p + 1: the lower and the upper half of part p, set where it is kept.
constexpr uint32_t KeptLanes(const PhiloxBlock& x, uint32_t threshold) {
  uint32_t bits = 0;
  bits |= uint32_t{(x.x0 & 0xffff) >= threshold};
  bits |= uint32_t{(x.x0 >> 16) >= threshold} << 1;
  bits |= uint32_t{(x.x1 & 0xffff) >= threshold} << 2;
  bits |= uint32_t{(x.x1 >> 16) >= threshold} << 3;
  bits |= uint32_t{(x.x2 & 0xffff) >= threshold} << 4;
  bits |= uint32_t{(x.x2 >> 16) >= threshold} << 5;
  bits |= uint32_t{(x.x3 & 0xffff) >= threshold} << 6;
  bits |= uint32_t{(x.x3 >> 16) >= threshold} << 7;
  return bits;
}

// Both halves of x, each no less than that of `least` and no more than that of `most`.
constexpr uint32_t ClampHalves(uint32_t x, uint32_t least, uint32_t most) {
#ifdef __CUDA_ARCH__
  return __vmaxu2(__vminu2(x, most), least);
#else
  uint32_t clamped = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    uint32_t half = x >> shift & 0xffff;
    if (half > (most >> shift & 0xffff)) half = most >> shift & 0xffff;
    if (half < (least >> shift & 0xffff)) half = least >> shift & 0xffff;
    clamped |= half << shift;
  }
  return clamped;
#endif
}

// Computes which lanes of up to 16 parts of Philox calls are kept: bit j of the lower half for the
// lower lane of part j, bit j of the upper half for its upper lane. Lanes are clamped to [threshold
// - 1, threshold] and summed with weights 2^j. That takes three instructions for two lanes, and no
// comparison. `threshold` is in 1 to 65535.
struct KeepSum {
  uint32_t most, least;  // both lanes
  uint32_t sum = 0;
  uint32_t weights = 0;

  constexpr explicit KeepSum(uint32_t threshold)
      : most(threshold * 0x10001), least(most - 0x10001) {}

  // Adds part j; at most one part for each j below 16.
  constexpr void Add(uint32_t part, int j) {
    sum += ClampHalves(part, least, most) << j;
    weights += 1u << j;
  }
  // Each lane added `least`, or one more if it is kept. The carries out of a half are those of
  // `least`.
  constexpr uint32_t Bits() const { return sum - least * weights; }
};

// Converts the two lanes of a part to masks of the halves of a word: all bits of a half are set if
// its lane is kept. `threshold` is in 1 to 65535.
struct KeepMask {
  uint32_t most, least;  // both lanes, as in KeepSum
  uint32_t addend;

  constexpr explicit KeepMask(uint32_t threshold)
      : most(threshold * 0x10001), least(most - 0x10001), addend(0 - least * 0xffff) {}

  constexpr uint32_t Of(uint32_t part) const {
    return ClampHalves(part, least, most) * 0xffff + addend;
  }
};

// Returns the call that contains key `key` of the row.
constexpr PhiloxBlock CallOf(const PhiloxRow& row, uint64_t key) {
  const uint32_t counter = static_cast<uint32_t>(4 * (key / 32) + key / 2 % 4);
  return Philox({counter, row.row, row.head, row.batch}, row.key0, row.key1);
}

// Bit 2 n + i, for n < 16: whether key `key` + 8 n + i is kept. `key` is even.
constexpr uint32_t KeepBitsFromEven(const PhiloxRow& row, uint64_t key, uint32_t threshold) {
  const uint32_t skipped = key / 8 % 4;  // parts of the first call
  const uint64_t first = key - 8 * skipped;
  uint64_t bits = 0;
#ifdef __CUDA_ARCH__
#pragma unroll 2
#endif
  for (uint32_t word = 0; word < 4; ++word) {
    bits |= uint64_t{KeptLanes(CallOf(row, first + 32 * word), threshold)} << (8 * word);
  }
  if (skipped != 0) bits |= uint64_t{KeptLanes(CallOf(row, first + 128), threshold)} << 32;
  return static_cast<uint32_t>(bits >> (2 * skipped));
}

// The same for any key; an odd key takes twice the calls.
constexpr uint32_t KeepBits(const PhiloxRow& row, uint64_t key, uint32_t threshold) {
  const bool odd = key % 2 != 0;
  uint32_t bits = 0;
  // For an odd key, the bits of even columns are the odd bits of the preceding key, and those of
  // odd columns are the even bits of the following key. A loop, because the code is long.
#ifdef __CUDA_ARCH__
#pragma unroll 1
#endif
  for (int pass = 0; pass < (odd ? 2 : 1); ++pass) {
    const uint32_t part = KeepBitsFromEven(row, odd ? key - 1 + 2 * pass : key, threshold);
    bits |= !odd ? part : pass == 0 ? part >> 1 & 0x55555555 : (part & 0x55555555) << 1;
  }
  return bits;
}

// Whether one key is kept.
constexpr bool Keeps(const PhiloxRow& row, uint64_t key, uint32_t threshold) {
  const uint32_t lane = 2 * (key / 8 % 4) + key % 2;
  return KeptLanes(CallOf(row, key), threshold) >> lane & 1;
}

// Returns the bits of KeepBits for keys `key` + stride (8 n + i), with one call per key.
constexpr uint32_t StridedKeepBits(const PhiloxRow& row, uint64_t key, uint64_t stride,
                                   uint32_t threshold) {
  uint32_t bits = 0;
#ifdef __CUDA_ARCH__
#pragma unroll 1
#endif
  for (uint32_t bit = 0; bit < 32; ++bit) {
    bits |= uint32_t{Keeps(row, key + stride * (bit / 2 * 8 + bit % 2), threshold)} << bit;
  }
  return bits;
}

// Converts the order of KeepBits to that of KeepSum: bit 2 n + i to bit 16 i + n.
constexpr uint32_t ByHalves(uint32_t bits) {
  uint32_t swapped = (bits ^ bits >> 1) & 0x22222222;  // the perfect unshuffle, outside in
  bits ^= swapped ^ swapped << 1;
  swapped = (bits ^ bits >> 2) & 0x0c0c0c0c;
  bits ^= swapped ^ swapped << 2;
  swapped = (bits ^ bits >> 4) & 0x00f000f0;
  bits ^= swapped ^ swapped << 4;
  swapped = (bits ^ bits >> 8) & 0x0000ff00;
  return bits ^ swapped ^ swapped << 8;
}

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PLAN_KEEP_BITS_H_
