// StagingPool: the library's own regions, through which it stages tensors that lie in no region of
// the caller's.
// Tests: staging_pool_test.cc.
#ifndef RINGATTN_CLIENT_MEMORY_STAGING_POOL_H_
#define RINGATTN_CLIENT_MEMORY_STAGING_POOL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/memory/region_index.h"
#include "client/memory/shared_region.h"

namespace ringattn::client {

struct StagingOptions {
  int64_t max_bytes = 0;  // of all regions together; 0: no staging
  // A region that has been unused this long is freed.
  absl::Duration idle = absl::Seconds(20);
  // After a failure the pool does not try again for this long.
  absl::Duration refusal_kept = absl::Seconds(5);
};

// Thread safe.
class StagingPool {
 public:
  // `attach`: LocalMemoryService.Attach. `index`: where calls look up regions.
  StagingPool(StagingOptions options, std::function<SharedRegion::AttachCall()> attach,
              std::shared_ptr<RegionIndex> index);
  // Requires that everything taken was given back.
  ~StagingPool();

  StagingPool(const StagingPool&) = delete;
  StagingPool& operator=(const StagingPool&) = delete;

  // Returns whether it makes sense to take this much now; if not, the reason in `why`. Does not
  // block.
  bool MayTake(int64_t bytes, std::string* why) const ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns a region that is ready, or null. If null, `prepare` is true if the caller should call
  // Prepare: not after the first miss, because a client that makes one call is faster by the relay,
  // and not while another Prepare runs. Does not block.
  std::shared_ptr<SharedRegion> TakeReady(int64_t bytes, bool* prepare) ABSL_LOCKS_EXCLUDED(mutex_);
  // Creates a region for a later call. Blocks as Take does.
  void Prepare(int64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  // Stops creating regions, before destruction.
  void Close() ABSL_LOCKS_EXCLUDED(mutex_);

  // Returns a region of at least `bytes` that some worker has attached, for exclusive use until it
  // is given back. Blocks while memory is allocated and attached: 0.3 s per GB, 10 s if a worker
  // hangs. Errors, whose messages go into reports: FAILED_PRECONDITION if no worker of this machine
  // attaches memory; RESOURCE_EXHAUSTED beyond max_bytes or with too little free memory. Thread
  // safe.
  absl::StatusOr<std::shared_ptr<SharedRegion>> Take(int64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  // `reusable`: no worker writes to the region any more. Otherwise it is unmapped. Must not run on
  // a region's thread, which it may wait for.
  void GiveBack(std::shared_ptr<SharedRegion> region, bool reusable) ABSL_LOCKS_EXCLUDED(mutex_);

  // Frees regions that have been idle for long.
  void Trim() ABSL_LOCKS_EXCLUDED(mutex_);

  int64_t bytes() const ABSL_LOCKS_EXCLUDED(mutex_);  // of all regions

 private:
  struct Idle {
    std::shared_ptr<SharedRegion> region;
    absl::Time since;
  };

  std::shared_ptr<SharedRegion> TakeIdle(int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Probe();
  absl::Status Refuse(absl::Status why) ABSL_LOCKS_EXCLUDED(mutex_);
  void Drop(const std::vector<std::shared_ptr<SharedRegion>>& regions);

  const StagingOptions options_;
  const std::function<SharedRegion::AttachCall()> attach_;
  const std::shared_ptr<RegionIndex> index_;
  mutable absl::Mutex mutex_;
  int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // in use, idle, and being created
  std::vector<Idle> idle_ ABSL_GUARDED_BY(mutex_);
  int64_t misses_ ABSL_GUARDED_BY(mutex_) = 0;  // of TakeReady
  bool preparing_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool probed_ ABSL_GUARDED_BY(mutex_) = false;  // a worker has attached memory
  absl::Status refusal_ ABSL_GUARDED_BY(mutex_);
  absl::Time refused_until_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
};

// Returns how much memory this process may still allocate, by the machine and by its cgroup (v2);
// INT64_MAX if the system does not report it.
int64_t AvailableMemoryBytes();

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_MEMORY_STAGING_POOL_H_
