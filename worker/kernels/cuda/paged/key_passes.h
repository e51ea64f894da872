// How an sm_90a producer walks the keys of an item: passes from the last keys to the first, and the
// mask of each pass. Pure arithmetic: the device executes it, and tests check it on the host.
//
// The consumers mask row r of a pass to columns [lower + r, upper + r] below `columns`. A cache of
// one part has one pass for each tile. In a cache of several parts, the bounds of consecutive
// queries advance only within a block of the sequence that is the part's own, so these numbers
// cannot describe any tile. Three kinds of passes can be described:
//   - a tile that all queries see needs no mask;
//   - where all queries see the same entries, one pair of bounds serves all rows;
//   - within one block, places in the cache and in the sequence differ by a constant.
// A tile of the third kind therefore takes a pass for each of its blocks. There are few: the tiles
// at the two ends of what the queries see.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PAGED_KEY_PASSES_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PAGED_KEY_PASSES_H_

#include <cstdint>

#include "worker/kernels/cuda/paged/work_split.h"

namespace ringattn::worker::cuda::paged {

// One load of at most kKeys keys.
struct KeyPass {
  int32_t first = 0;  // the key of column 0
  int32_t end = 0;    // keys from here on are not loaded
  int32_t lower = 0;
  int32_t upper = 0;
  int32_t columns = 0;
  bool masked = false;  // not every query sees every column
  bool last = false;    // of the item
};

template <int kKeys>
class KeyPasses {
 public:
  // Queries [first_query, first_query + queries) of the row, and tiles [tile_begin, tile_end) of
  // `keys`, which holds all that they see.
  RINGATTN_PAGED_INLINE KeyPasses(const PagedRow& row, const MaskRule& mask, const KeySpan& keys,
                                  int32_t first_query, int32_t queries, int32_t tile_begin,
                                  int32_t tile_end)
      : mask_(mask),
        keys_(keys),
        position_(PositionOf(row, mask.part, first_query)),
        queries_(queries),
        tile_begin_(tile_begin),
        tile_(tile_end) {
    if (mask.part.count == 1) return;
    common_ = CommonKeys(row, mask, first_query, first_query + queries);
    seen_ = VisibleKeys(row, mask, first_query, first_query + queries);
    const int64_t end = int64_t{tile_end} * kKeys;
    end_ = end < keys.end ? static_cast<int32_t>(end) : keys.end;
    begin_ = Max(tile_begin * kKeys, keys.begin);
  }

  // The next pass, in front of the one before. REQUIRES: that one was not the last.
  RINGATTN_PAGED_INLINE KeyPass Next() { return mask_.part.count == 1 ? NextTile() : NextOfPart(); }

 private:
  static constexpr int64_t kLimit = int64_t{1} << 30;

  RINGATTN_PAGED_INLINE KeyPass NextTile() {
    --tile_;
    KeyPass pass;
    pass.first = tile_ * kKeys;
    pass.end = keys_.end;
    pass.last = tile_ == tile_begin_;
    int64_t lower = -kLimit, upper = kLimit;
    if (mask_.window_left >= 0) lower = int64_t{position_} - mask_.window_left - pass.first;
    if (mask_.causal != 0) upper = int64_t{position_} - pass.first;
    const int32_t columns = keys_.end - pass.first;
    const bool whole = lower + queries_ - 1 <= 0 && upper >= kKeys - 1 && columns >= kKeys;
    Describe(lower, upper, columns, !whole, pass);
    return pass;
  }

  RINGATTN_PAGED_INLINE KeyPass NextOfPart() {
    KeyPass pass;
    if (end_ <= begin_) {  // no keys: one pass, so that the results of all queries are written
      pass.last = true;
      Describe(-kLimit, kLimit, 0, true, pass);
      return pass;
    }
    const int32_t tile_first = (end_ - 1) / kKeys * kKeys;
    pass.first = tile_first;
    pass.end = end_;
    int64_t lower = -kLimit, upper = kLimit;
    int32_t columns = end_ - tile_first;
    bool masked = true;
    if (tile_first >= common_.begin && end_ <= common_.end && columns == kKeys) {
      masked = false;
    } else if (seen_.begin == common_.begin && seen_.end == common_.end &&
               (queries_ == 1 || seen_.begin <= tile_first)) {
      if (seen_.begin > tile_first) lower = seen_.begin - tile_first;
      columns = Min(columns, seen_.end - tile_first);
    } else {
      const int32_t block = (end_ - 1) >> mask_.part.block_shift;
      pass.first = Max(tile_first, block << mask_.part.block_shift);
      columns = end_ - pass.first;
      const int64_t place = pass.first + ShiftOfBlock(mask_.part, block);
      if (mask_.window_left >= 0) lower = int64_t{position_} - mask_.window_left - place;
      if (mask_.causal != 0) upper = int64_t{position_} - place;
    }
    end_ = pass.first;
    pass.last = end_ <= begin_;
    Describe(lower, upper, columns, masked, pass);
    return pass;
  }

  static RINGATTN_PAGED_INLINE void Describe(int64_t lower, int64_t upper, int32_t columns,
                                             bool masked, KeyPass& pass) {
    pass.lower = static_cast<int32_t>(lower < -kLimit ? -kLimit : lower);
    pass.upper = static_cast<int32_t>(upper > kLimit ? kLimit : upper);
    pass.columns = columns;
    pass.masked = masked;
  }
  static RINGATTN_PAGED_INLINE int32_t Max(int32_t a, int32_t b) { return a > b ? a : b; }
  static RINGATTN_PAGED_INLINE int32_t Min(int32_t a, int32_t b) { return a < b ? a : b; }

  const MaskRule& mask_;
  const KeySpan keys_;
  const int32_t position_;
  const int32_t queries_;
  const int32_t tile_begin_;
  int32_t tile_;  // of one part: the tile after the next one
  // In several parts: keys that at least one and that all queries see, and the keys to walk.
  KeySpan seen_, common_;
  int32_t begin_ = 0, end_ = 0;
};

}  // namespace ringattn::worker::cuda::paged

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PAGED_KEY_PASSES_H_
