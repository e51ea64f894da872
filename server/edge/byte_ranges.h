// ByteRanges: which bytes of one tensor have arrived.
#ifndef RINGATTN_SERVER_EDGE_BYTE_RANGES_H_
#define RINGATTN_SERVER_EDGE_BYTE_RANGES_H_

#include <cstdint>
#include <iterator>
#include <map>

namespace ringattn::server {

// Memory: one node per gap, of which there are at most max_ranges. Not thread safe.
class ByteRanges {
 public:
  enum class Added {
    kNew,
    kOverlaps,    // with what has arrived; nothing was added
    kTooManyGaps  // likewise
  };

  // REQUIRES: size >= 0, max_ranges >= 1.
  ByteRanges(int64_t size, size_t max_ranges) : size_(size), max_ranges_(max_ranges) {}

  // REQUIRES: 0 <= begin < end <= size.
  Added Add(int64_t begin, int64_t end) {
    const auto next = ranges_.lower_bound(begin);
    if (next != ranges_.end() && next->first < end) return Added::kOverlaps;
    const bool has_previous = next != ranges_.begin();
    const auto previous = has_previous ? std::prev(next) : ranges_.end();
    if (has_previous && previous->second > begin) return Added::kOverlaps;

    const bool joins_previous = has_previous && previous->second == begin;
    const bool joins_next = next != ranges_.end() && next->first == end;
    if (!joins_previous && !joins_next && ranges_.size() >= max_ranges_) {
      return Added::kTooManyGaps;
    }
    covered_ += end - begin;
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

  int64_t covered() const { return covered_; }
  bool complete() const { return covered_ == size_; }
  // The offset of the first byte that has not arrived; size if none is missing.
  int64_t first_missing() const {
    return ranges_.empty() || ranges_.begin()->first > 0 ? 0 : ranges_.begin()->second;
  }

 private:
  const int64_t size_;
  const size_t max_ranges_;
  int64_t covered_ = 0;
  std::map<int64_t, int64_t> ranges_;  // begin -> end, disjoint, never adjacent
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_BYTE_RANGES_H_
