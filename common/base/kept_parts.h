// KeptParts: prepared parts of operations that have ended, for equal operations that follow. A
// part is what is costly to prepare (program, memory, kernel calls), and its recipe is everything
// that it depends on. Parts are bounded by number and bytes, and each is leased: a part that no
// operation takes within the lease is dropped.
//
// The caller destroys dropped parts, so that it can do so without its lock.
#ifndef RINGATTN_COMMON_BASE_KEPT_PARTS_H_
#define RINGATTN_COMMON_BASE_KEPT_PARTS_H_

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace ringattn {

// Not thread safe.
template <typename Part>
class KeptParts {
 public:
  struct Bounds {
    size_t max_count = 0;
    int64_t max_bytes = 0;
    absl::Duration lease;
  };
  struct Counts {
    int64_t hits = 0;       // Take() returned a part
    int64_t misses = 0;     // Take() returned none
    int64_t evictions = 0;  // dropped before the end of the lease, for memory or for another part
    int64_t expiries = 0;   // dropped at the end of the lease
  };

  explicit KeptParts(const Bounds& bounds) : bounds_(bounds) {}

  // Returns the part of this recipe that was kept last, which is then no longer kept; nullopt if
  // there is none whose lease holds.
  std::optional<Part> Take(absl::string_view recipe, absl::Time now) {
    for (auto entry = entries_.rbegin(); entry != entries_.rend(); ++entry) {
      if (entry->expires <= now) break;  // and so have all before it
      if (entry->recipe != recipe) continue;
      std::optional<Part> part(std::move(entry->part));
      bytes_ -= entry->bytes;
      entries_.erase(std::next(entry).base());
      ++counts_.hits;
      return part;
    }
    ++counts_.misses;
    return std::nullopt;
  }

  // Keeps the part. Returns what the bounds drop for it, the oldest first; that is `part` itself if
  // it exceeds the bounds alone.
  std::vector<Part> Keep(std::string recipe, int64_t bytes, Part part, absl::Time now) {
    std::vector<Part> dropped;
    if (bounds_.max_count == 0 || bytes > bounds_.max_bytes) {
      dropped.push_back(std::move(part));
      return dropped;
    }
    while (entries_.size() >= bounds_.max_count || bytes_ > bounds_.max_bytes - bytes) {
      DropOldest(&dropped);
      ++counts_.evictions;
    }
    bytes_ += bytes;
    entries_.push_back({std::move(recipe), bytes, now + bounds_.lease, std::move(part)});
    return dropped;
  }

  // Drops the oldest parts until they make up at least `bytes`, or all.
  std::vector<Part> Evict(int64_t bytes) {
    std::vector<Part> dropped;
    const int64_t until = bytes_ - bytes;
    while (!entries_.empty() && bytes_ > until) {
      DropOldest(&dropped);
      ++counts_.evictions;
    }
    return dropped;
  }

  // Drops the parts whose lease has ended.
  std::vector<Part> Expire(absl::Time now) {
    std::vector<Part> dropped;
    while (!entries_.empty() && entries_.front().expires <= now) {
      DropOldest(&dropped);
      ++counts_.expiries;
    }
    return dropped;
  }

  // Drops everything. Counts nothing.
  std::vector<Part> Clear() {
    std::vector<Part> dropped;
    while (!entries_.empty()) DropOldest(&dropped);
    return dropped;
  }

  size_t count() const { return entries_.size(); }
  int64_t bytes() const { return bytes_; }
  const Counts& counts() const { return counts_; }

 private:
  struct Entry {
    std::string recipe;
    int64_t bytes = 0;
    absl::Time expires;
    Part part;
  };

  void DropOldest(std::vector<Part>* dropped) {
    bytes_ -= entries_.front().bytes;
    dropped->push_back(std::move(entries_.front().part));
    entries_.pop_front();
  }

  const Bounds bounds_;
  std::list<Entry> entries_;  // oldest first, so that leases end in this order
  int64_t bytes_ = 0;
  Counts counts_;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_BASE_KEPT_PARTS_H_
