// RegionIndex: finds the region of a client in which a tensor's memory lies.
// Tests: client/call/region_call_test.cc.
#ifndef RINGATTN_CLIENT_MEMORY_REGION_INDEX_H_
#define RINGATTN_CLIENT_MEMORY_REGION_INDEX_H_

#include <cstdint>
#include <map>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "client/memory/shared_region.h"

namespace ringattn::client {

// Thread safe.
class RegionIndex {
 public:
  void Add(const std::shared_ptr<SharedRegion>& region) {
    const absl::MutexLock lock(&mutex_);
    regions_[region->data()] = region;
  }
  void Remove(const SharedRegion* region) {
    const absl::MutexLock lock(&mutex_);
    regions_.erase(region->data());
  }

  // Returns null unless all bytes lie in one region.
  std::shared_ptr<SharedRegion> Find(const uint8_t* data, uint64_t bytes) const {
    const absl::MutexLock lock(&mutex_);
    auto after = regions_.upper_bound(data);
    if (after == regions_.begin()) return nullptr;
    const std::shared_ptr<SharedRegion>& region = std::prev(after)->second;
    const auto offset = static_cast<uint64_t>(data - region->data());
    const auto size = static_cast<uint64_t>(region->bytes());
    return offset <= size && bytes <= size - offset ? region : nullptr;
  }
  // Returns any host region; null if there is none.
  std::shared_ptr<SharedRegion> Any() const {
    const absl::MutexLock lock(&mutex_);
    for (const auto& [data, region] : regions_) {
      if (region->cuda() == nullptr) return region;
    }
    return nullptr;
  }

 private:
  mutable absl::Mutex mutex_;
  std::map<const uint8_t*, std::shared_ptr<SharedRegion>> regions_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_MEMORY_REGION_INDEX_H_
