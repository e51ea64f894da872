// Dropout's bits in the shapes in which tensor cores hand out scores. docs/semantics.md says which
// bits a pair has; philox.h makes them. Pure; host and device.
//
// One call of Philox serves eight keys of a query, of which a forward's thread has all where its
// range begins at an even key, wherever else it begins: what a range's offset mod 32 costs is one
// call more (five for 128 keys instead of four), so that ranges need no alignment of their own.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_KEEP_BITS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_KEEP_BITS_H_

#include <cstdint>

#include "worker/kernels/philox.h"

namespace ringattn::worker::cuda {

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

// The call that has key `key` of the row.
constexpr PhiloxBlock CallOf(const PhiloxRow& row, uint64_t key) {
  const uint32_t counter = static_cast<uint32_t>(4 * (key / 32) + key / 2 % 4);
  return Philox({counter, row.row, row.head, row.batch}, row.key0, row.key1);
}

// Bit 2 n + i, of n < 16: whether key `key` + 8 n + i is kept. `key` is even.
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

// The same from any key; twice the calls from an odd one.
constexpr uint32_t KeepBits(const PhiloxRow& row, uint64_t key, uint32_t threshold) {
  const bool odd = key % 2 != 0;
  uint32_t bits = 0;
  // Of an odd key the bits of even columns stand at the odd places of the key before it, and those
  // of odd columns at the even places of the one behind. A loop: the code is long.
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

// Of the keys even, even + 1, even + 8 and even + 9, `even` being `key` without its lowest bit,
// bits 0 to 3. One call. REQUIRES: they share a word of 32 keys.
constexpr uint32_t KeepQuad(const PhiloxRow& row, uint64_t key, uint32_t threshold) {
  return KeptLanes(CallOf(row, key), threshold) >> (2 * (key / 8 % 4)) & 0xf;
}

// The same bits as KeepBits has, of keys `key` + stride (8 n + i): a call for each.
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

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_KEEP_BITS_H_
