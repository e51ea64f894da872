#include "worker/device/cuda/extent_allocator.h"

#include <algorithm>
#include <cassert>
#include <iterator>

namespace ringattn::worker {

ExtentAllocator::ExtentAllocator(int64_t size, int64_t alignment)
    : alignment_(alignment), free_bytes_(size / alignment * alignment) {
  if (free_bytes_ > 0) free_.emplace(0, free_bytes_);
}

std::optional<int64_t> ExtentAllocator::Take(int64_t bytes) {
  if (bytes > free_bytes_) return std::nullopt;
  const int64_t size = (bytes + alignment_ - 1) / alignment_ * alignment_;
  auto best = free_.end();
  for (auto extent = free_.begin(); extent != free_.end(); ++extent) {
    if (extent->second < size) continue;
    if (best == free_.end() || extent->second < best->second) best = extent;
  }
  if (best == free_.end()) return std::nullopt;
  const auto [offset, found] = *best;
  free_.erase(best);
  if (found > size) free_.emplace(offset + size, found - size);
  taken_.emplace(offset, size);
  free_bytes_ -= size;
  return offset;
}

void ExtentAllocator::Give(int64_t offset) {
  const auto taken = taken_.find(offset);
  assert(taken != taken_.end());
  int64_t begin = offset, size = taken->second;
  taken_.erase(taken);
  free_bytes_ += size;
  auto after = free_.lower_bound(begin);
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == begin) {
      begin = before->first;
      size += before->second;
      free_.erase(before);
    }
  }
  if (after != free_.end() && begin + size == after->first) {
    size += after->second;
    free_.erase(after);
  }
  free_.emplace(begin, size);
}

int64_t ExtentAllocator::largest_free_bytes() const {
  int64_t largest = 0;
  for (const auto& [offset, size] : free_) largest = std::max(largest, size);
  return largest;
}

}  // namespace ringattn::worker
