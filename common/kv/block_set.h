// KvBlockSet: a set of block numbers that finds its lowest member quickly.
#ifndef RINGATTN_COMMON_KV_BLOCK_SET_H_
#define RINGATTN_COMMON_KV_BLOCK_SET_H_

#include <cstdint>
#include <vector>

namespace ringattn {

// A bitmap with summaries: bit i of level n + 1 is set if word i of level n is not 0. So every
// operation takes one step per level, four levels for 2^24 blocks. Not thread safe.
class KvBlockSet {
 public:
  // Numbers are below `blocks`. The set starts empty, or with all of them if `full`.
  explicit KvBlockSet(int64_t blocks, bool full);

  bool Contains(uint32_t block) const { return (levels_[0][block / 64] >> (block % 64) & 1) != 0; }
  // Returns false if it was a member already.
  bool Insert(uint32_t block);
  // REQUIRES: Contains(block).
  void Remove(uint32_t block);
  // REQUIRES: size() > 0.
  uint32_t Lowest() const;

  int64_t size() const { return size_; }

 private:
  std::vector<std::vector<uint64_t>> levels_;
  int64_t size_ = 0;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_KV_BLOCK_SET_H_
