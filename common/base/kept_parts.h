// KeptParts: prepared parts of operations that have ended, for equal operations that follow. A
// part is what is costly to prepare (program, memory, kernel calls), and its recipe is everything
// that it depends on. Parts are bounded by number and bytes, and each is leased: a part that no
// operation takes within the lease is dropped. A hold on a recipe makes the leases of its parts
// longer.
//
// The caller destroys dropped parts, so that it can do so without its lock.
#ifndef RINGATTN_COMMON_BASE_KEPT_PARTS_H_
#define RINGATTN_COMMON_BASE_KEPT_PARTS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <list>
#include <map>
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
      if (entry->expires <= now || entry->recipe != recipe) continue;
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
    const auto hold = holds_.find(recipe);
    const absl::Time held_until = hold == holds_.end() ? absl::InfinitePast() : hold->second;
    entries_.push_back(
        {std::move(recipe), bytes, std::max(now + bounds_.lease, held_until), std::move(part)});
    return dropped;
  }

  // Holds the recipe: the leases of its parts, kept now or later, end at `until` or later. The
  // bounds apply nevertheless, and also bound the number of holds: the one that ends first is
  // dropped. Returns the bytes of the part that was kept last; nullopt if none is kept.
  std::optional<int64_t> Hold(absl::string_view recipe, absl::Time until) {
    if (bounds_.max_count == 0) return std::nullopt;
    const auto known = holds_.find(recipe);
    if (known != holds_.end()) {
      known->second = std::max(known->second, until);
    } else {
      if (holds_.size() >= bounds_.max_count) {
        holds_.erase(
            std::min_element(holds_.begin(), holds_.end(),
                             [](const auto& a, const auto& b) { return a.second < b.second; }));
      }
      holds_.emplace(recipe, until);
    }
    std::optional<int64_t> bytes;
    for (Entry& entry : entries_) {
      if (entry.recipe != recipe) continue;
      entry.expires = std::max(entry.expires, until);
      bytes = entry.bytes;
    }
    return bytes;
  }

  // Returns the bytes of the part of this recipe that was kept last; nullopt if none is kept.
  std::optional<int64_t> BytesOf(absl::string_view recipe) const {
    for (auto entry = entries_.rbegin(); entry != entries_.rend(); ++entry) {
      if (entry->recipe == recipe) return entry->bytes;
    }
    return std::nullopt;
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
    for (auto entry = entries_.begin(); entry != entries_.end();) {
      const auto next = std::next(entry);
      if (entry->expires <= now) {
        Drop(entry, &dropped);
        ++counts_.expiries;
      }
      entry = next;
    }
    for (auto hold = holds_.begin(); hold != holds_.end();) {
      hold = hold->second <= now ? holds_.erase(hold) : std::next(hold);
    }
    return dropped;
  }

  // Drops everything, holds included. Counts nothing.
  std::vector<Part> Clear() {
    std::vector<Part> dropped;
    while (!entries_.empty()) DropOldest(&dropped);
    holds_.clear();
    return dropped;
  }

  const Bounds& bounds() const { return bounds_; }
  size_t holds() const { return holds_.size(); }

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

  void Drop(typename std::list<Entry>::iterator entry, std::vector<Part>* dropped) {
    bytes_ -= entry->bytes;
    dropped->push_back(std::move(entry->part));
    entries_.erase(entry);
  }
  void DropOldest(std::vector<Part>* dropped) { Drop(entries_.begin(), dropped); }

  const Bounds bounds_;
  std::list<Entry> entries_;                              // oldest first
  std::map<std::string, absl::Time, std::less<>> holds_;  // by recipe: when each ends
  int64_t bytes_ = 0;
  Counts counts_;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_BASE_KEPT_PARTS_H_
