// Philox4x32-10 (Salmon et al., SC 2011), the source of dropout's bits. It is a function of a
// counter and a key, so the bits of any pair can be computed anywhere. docs/semantics.md defines
// which bits a pair uses.
#ifndef RINGATTN_WORKER_KERNELS_PHILOX_H_
#define RINGATTN_WORKER_KERNELS_PHILOX_H_

#include <cstdint>

namespace ringattn::worker {

inline constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53;
inline constexpr uint32_t kPhiloxMultiplier1 = 0xCD9E8D57;
inline constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9;
inline constexpr uint32_t kPhiloxWeyl1 = 0xBB67AE85;
inline constexpr int kPhiloxRounds = 10;

struct PhiloxBlock {
  uint32_t x0, x1, x2, x3;
};

// Returns the bits of a counter.
constexpr PhiloxBlock Philox(PhiloxBlock c, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t a = uint64_t{kPhiloxMultiplier0} * c.x0;
    const uint64_t b = uint64_t{kPhiloxMultiplier1} * c.x2;
    c = {static_cast<uint32_t>(b >> 32) ^ c.x1 ^ key0, static_cast<uint32_t>(b),
         static_cast<uint32_t>(a >> 32) ^ c.x3 ^ key1, static_cast<uint32_t>(a)};
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  return c;
}

// A row's random stream: counters (n, row, head, batch), where n counts groups of eight keys.
struct PhiloxRow {
  uint32_t key0 = 0, key1 = 0;
  uint32_t row = 0, head = 0, batch = 0;
};

// Returns the bits of counter 4 * word + quarter in a word of 32 keys: bit k is set if key 32 *
// word + k is kept. Lane l of the 128 bits belongs to key 8 * (l / 2) + 2 * quarter + l % 2.
constexpr uint32_t KeepBitsOfQuarter(const PhiloxRow& row, uint32_t word, uint32_t quarter,
                                     uint32_t threshold) {
  const PhiloxBlock x =
      Philox({4 * word + quarter, row.row, row.head, row.batch}, row.key0, row.key1);
  const uint32_t parts[4] = {x.x0, x.x1, x.x2, x.x3};
  uint32_t bits = 0;
  for (int k = 0; k < 4; ++k) {
    bits |= uint32_t{(parts[k] & 0xffff) >= threshold} << (8 * k);
    bits |= uint32_t{(parts[k] >> 16) >= threshold} << (8 * k + 1);
  }
  return bits << (2 * quarter);
}

constexpr uint32_t KeepWord(const PhiloxRow& row, uint32_t word, uint32_t threshold) {
  uint32_t bits = 0;
  for (uint32_t quarter = 0; quarter < 4; ++quarter) {
    bits |= KeepBitsOfQuarter(row, word, quarter, threshold);
  }
  return bits;
}

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_KERNELS_PHILOX_H_
