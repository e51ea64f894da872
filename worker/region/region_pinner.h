// RegionPinner: pins regions that are used again, in the background, so that a device's copies
// reach them without staging. Staged copies run at 8 GB/s for each thread, a GPU's own at its
// link's rate; pinning costs some 20 GB/s once and holds the driver up meanwhile, so a region that
// is used once is never pinned, and one that is, a piece at a time with pauses.
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
  // `device` outlives it and every region that it was given. At most `max_bytes` are pinned at a
  // time; a region that does not fit beside the others is not pinned. `on_pinned` (for metrics)
  // is told, on any thread, of changes of what is pinned in all.
  RegionPinner(Device* device, int64_t max_bytes, std::function<void(int64_t bytes)> on_pinned);
  // What is pinned stays so, with its region.
  ~RegionPinner();

  RegionPinner(const RegionPinner&) = delete;
  RegionPinner& operator=(const RegionPinner&) = delete;

  // The region has served an operation. Never blocks; of a region that was wanted before, nothing.
  void Want(const std::shared_ptr<Region>& region) ABSL_LOCKS_EXCLUDED(mutex_);

  int64_t pinned_bytes() const;

 private:
  // What is pinned, told when it changes. Shared with the pins, which may outlive the pinner.
  class Budget;
  class CountedPin;

  void Run();
  // False: it is to stop.
  bool PinWhole(Region& region);
  // False: no more of this region.
  bool PinNextPiece(Region& region);

  Device* const device_;
  const std::shared_ptr<Budget> budget_;

  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool useless_ ABSL_GUARDED_BY(mutex_) = false;  // the device has no use for pinned memory
  std::deque<std::weak_ptr<Region>> wanted_ ABSL_GUARDED_BY(mutex_);
  // Ids of regions that were wanted; the latest, lest it grow for ever.
  std::deque<std::string> known_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_REGION_REGION_PINNER_H_
