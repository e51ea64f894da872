// RegionPinner: pins regions that are used repeatedly, in the background, so that the device's copy
// engines access them without staging. Staged copies run at 8 GB/s per thread, a GPU's own copies
// at the link's rate. Pinning runs at about 20 GB/s and blocks the driver, which stops an exchange
// between GPUs for 3.3 ms per piece. Regions that are used once are therefore not pinned, and the
// others piece by piece, with pauses, while the worker has no operation that exchanges with peers.
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
#include "absl/time/time.h"
#include "worker/device/device.h"
#include "worker/region/region.h"

namespace ringattn::worker {

// Waits until the worker has no operation that exchanges with peers, neither a running one nor one
// that waits for its inputs. Returns false at `deadline` (MonotonicNow).
using AwaitNoPeers = std::function<bool(absl::Time deadline)>;

// Thread safe.
class RegionPinner {
 public:
  // Longest wait before a piece is pinned next to such operations, so that a worker that always has
  // one pins as well. It then loses about 3.3 ms of this time.
  static constexpr absl::Duration kLongestWait = absl::Milliseconds(100);

  // `device` must outlive the pinner and every region passed to it. At most `max_bytes` are pinned
  // at a time; a region that does not fit in addition to the others is not pinned. `on_pinned`, for
  // metrics, is called on any thread when the total of pinned bytes changes. `await_no_peers` is
  // called on the pinner's thread.
  RegionPinner(
      Device* device, int64_t max_bytes, std::function<void(int64_t bytes)> on_pinned,
      AwaitNoPeers await_no_peers = [](absl::Time) { return true; });
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
  // Waits until no operation exchanges with peers, at most kLongestWait. Returns early if the
  // region is released. Returns false if the pinner is being destroyed.
  bool AwaitTurn(const Region& region) ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns false if no more of this region is to be pinned.
  bool PinNextPiece(Region& region);

  Device* const device_;
  const std::shared_ptr<Budget> budget_;
  const AwaitNoPeers await_no_peers_;

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
