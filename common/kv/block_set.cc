#include "common/kv/block_set.h"

#include <bit>

namespace ringattn {

KvBlockSet::KvBlockSet(int64_t blocks, bool full) {
  int64_t bits = blocks;
  do {
    std::vector<uint64_t>& words = levels_.emplace_back((bits + 63) / 64, full ? ~uint64_t{0} : 0);
    if (full && bits % 64 != 0) words.back() = (uint64_t{1} << (bits % 64)) - 1;
    bits = static_cast<int64_t>(words.size());
  } while (bits > 1);
  size_ = full ? blocks : 0;
}

bool KvBlockSet::Insert(uint32_t block) {
  if (Contains(block)) return false;
  uint32_t bit = block;
  for (std::vector<uint64_t>& words : levels_) {
    words[bit / 64] |= uint64_t{1} << (bit % 64);
    bit /= 64;
  }
  ++size_;
  return true;
}

void KvBlockSet::Remove(uint32_t block) {
  uint32_t bit = block;
  for (std::vector<uint64_t>& words : levels_) {
    words[bit / 64] &= ~(uint64_t{1} << (bit % 64));
    if (words[bit / 64] != 0) break;
    bit /= 64;
  }
  --size_;
}

uint32_t KvBlockSet::Lowest() const {
  uint32_t word = 0;
  for (auto level = levels_.rbegin(); level != levels_.rend(); ++level) {
    word = word * 64 + static_cast<uint32_t>(std::countr_zero((*level)[word]));
  }
  return word;
}

}  // namespace ringattn
