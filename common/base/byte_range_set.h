// ByteRangeSet records which bytes of one tensor have arrived. The coordinator (uploads), the
// workers (shards) and the client (results) use it.
#ifndef RINGATTN_COMMON_BASE_BYTE_RANGE_SET_H_
#define RINGATTN_COMMON_BASE_BYTE_RANGE_SET_H_

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>

#include "common/base/limits.h"

namespace ringattn {

// Memory: one node of about 64 bytes per range, and at most max_ranges ranges. Not thread safe.
class ByteRangeSet {
 public:
  enum class Added {
    kNew,
    // The other values leave the set unchanged.
    kOutside,       // the range ends beyond the tensor
    kOverlaps,      // the range shares bytes with earlier ones
    kTooManyRanges  // the set already holds max_ranges ranges
  };

  // REQUIRES: size_bytes >= 0, max_ranges >= 1.
  explicit ByteRangeSet(int64_t size_bytes, size_t max_ranges = kMaxRangesPerTensor)
      : size_bytes_(size_bytes), max_ranges_(max_ranges) {}

  // Adds bytes [offset, offset + bytes). An empty range is kNew anywhere in [0, size], including
  // the end.
  Added Add(uint64_t offset, uint64_t bytes) {
    const auto size = static_cast<uint64_t>(size_bytes_);
    if (offset > size || bytes > size - offset) return Added::kOutside;
    if (bytes == 0) return Added::kNew;
    const auto begin = static_cast<int64_t>(offset);
    int64_t end = begin + static_cast<int64_t>(bytes);
    const auto next = ranges_.lower_bound(begin);
    if (next != ranges_.end() && next->first < end) return Added::kOverlaps;
    const bool has_previous = next != ranges_.begin();
    const auto previous = has_previous ? std::prev(next) : ranges_.end();
    if (has_previous && previous->second > begin) return Added::kOverlaps;

    const bool joins_previous = has_previous && previous->second == begin;
    const bool joins_next = next != ranges_.end() && next->first == end;
    if (!joins_previous && !joins_next && ranges_.size() >= max_ranges_) {
      return Added::kTooManyRanges;
    }
    covered_bytes_ += end - begin;
    if (joins_next) {
      end = next->second;
      ranges_.erase(next);
    }
    if (joins_previous) {
      previous->second = end;
    } else {
      ranges_.emplace(begin, end);
    }
    return Added::kNew;
  }

  int64_t size_bytes() const { return size_bytes_; }
  int64_t covered_bytes() const { return covered_bytes_; }
  bool complete() const { return covered_bytes_ == size_bytes_; }
  // Returns the offset of the first byte that has not arrived, or size_bytes if all have.
  int64_t first_missing() const {
    return ranges_.empty() || ranges_.begin()->first > 0 ? 0 : ranges_.begin()->second;
  }

 private:
  int64_t size_bytes_;
  size_t max_ranges_;
  int64_t covered_bytes_ = 0;
  std::map<int64_t, int64_t> ranges_;  // begin -> end, disjoint, never adjacent
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_BASE_BYTE_RANGE_SET_H_
