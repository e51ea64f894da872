// ByteCoverage: which bytes of one tensor have arrived.
#ifndef RINGATTN_WORKER_SERVICE_BYTE_COVERAGE_H_
#define RINGATTN_WORKER_SERVICE_BYTE_COVERAGE_H_

#include <cstdint>
#include <iterator>
#include <map>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace ringattn::worker {

// Memory is bounded by the number of gaps between what has arrived. Not thread safe.
class ByteCoverage {
 public:
  // REQUIRES: size_bytes >= 0.
  explicit ByteCoverage(int64_t size_bytes) : size_bytes_(size_bytes) {}

  // Marks [offset, offset + bytes) as arrived. INVALID_ARGUMENT, and nothing marked,
  // if it reaches outside the tensor or overlaps what has arrived already.
  absl::Status Add(uint64_t offset, uint64_t bytes) {
    const uint64_t size = static_cast<uint64_t>(size_bytes_);
    if (offset > size || bytes > size - offset) {
      return absl::InvalidArgumentError(
          absl::StrCat("bytes ", offset, " + ", bytes, " reach outside a shard of ", size));
    }
    if (bytes == 0) return absl::OkStatus();
    int64_t begin = static_cast<int64_t>(offset), end = static_cast<int64_t>(offset + bytes);
    auto next = ranges_.lower_bound(begin);
    if (next != ranges_.end() && next->first < end) return Overlap(begin, end);
    if (next != ranges_.begin()) {
      auto previous = std::prev(next);
      if (previous->second > begin) return Overlap(begin, end);
      if (previous->second == begin) {
        begin = previous->first;
        ranges_.erase(previous);
      }
    }
    if (next != ranges_.end() && next->first == end) {
      end = next->second;
      ranges_.erase(next);
    }
    ranges_.emplace(begin, end);
    covered_bytes_ += static_cast<int64_t>(bytes);
    return absl::OkStatus();
  }

  bool complete() const { return covered_bytes_ == size_bytes_; }

 private:
  static absl::Status Overlap(int64_t begin, int64_t end) {
    return absl::InvalidArgumentError(
        absl::StrCat("bytes [", begin, ", ", end, ") were sent twice in part or whole"));
  }

  int64_t size_bytes_;
  int64_t covered_bytes_ = 0;
  std::map<int64_t, int64_t> ranges_;  // begin -> end, disjoint, never adjacent
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_SERVICE_BYTE_COVERAGE_H_
