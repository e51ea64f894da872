// RegionPinner: pins regions that are used repeatedly, in the background, so that the device's copy
// engines access them without staging. Staged copies run at 8 GB/s per thread, a GPU's own copies
// at the link's rate. Pinning runs at about 20 GB/s and blocks the driver. Regions that are used
// once are therefore not pinned, and the others piece by piece, with pauses.
#ifndef RINGATTN_WORKER_REGION_REGION_PINNER_H_
#define RINGATTN_WORKER_REGION_REGION_PINNER_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "worker/device/device.h"
#include "worker/region/region.h"

namespace ringattn::worker {

// Thread safe.
class RegionPinner {
 public:
  // `device` must outlive the pinner and every region passed to it. At most `max_bytes` are pinned
  // at a time; a region that does not fit in addition to the others is not pinned. `on_pinned`, for
  // metrics, is called on any thread when the total of pinned bytes changes.
  RegionPinner(Device* device, int64_t max_bytes, std::function<void(int64_t bytes)> on_pinned);
  // Pinned memory stays pinned, with its region.
  ~RegionPinner();

  RegionPinner(const RegionPinner&) = delete;
  RegionPinner& operator=(const RegionPinner&) = delete;

  // Reports that the region has served an operation, and schedules it for pinning. Never blocks.
  // Has no effect for a region that was scheduled before.
  void Schedule(const std::shared_ptr<Region>& region) ABSL_LOCKS_EXCLUDED(mutex_);

  int64_t pinned_bytes() const;

 private:
  // Counts pinned bytes and reports changes. Shared with the pins, which may outlive the pinner.
  class Budget;
  class CountedPin;

  void Run();
  // Returns false if the pinner is being destroyed.
  bool PinWhole(Region& region);
  // Returns false if no more of this region is to be pinned.
  bool PinNextPiece(Region& region);

  Device* const device_;
  const std::shared_ptr<Budget> budget_;

  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool unsupported_ ABSL_GUARDED_BY(mutex_) = false;  // the device does not use pinned memory
  std::deque<std::weak_ptr<Region>> scheduled_ ABSL_GUARDED_BY(mutex_);
  // Ids of scheduled regions; only the latest, so that the list stays bounded.
  std::deque<std::string> known_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_REGION_REGION_PINNER_H_
