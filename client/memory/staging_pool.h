// StagingPool: regions of the client library's own, through which tensors pass that lie in none
// of the caller's.
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
  int64_t max_bytes = 0;  // of all its regions together; 0: nothing is staged
  // What nobody has used for so long is given back to the system.
  absl::Duration idle = absl::Seconds(20);
  // After a "no" nobody asks again for so long.
  absl::Duration refusal_kept = absl::Seconds(5);
};

// Thread safe.
class StagingPool {
 public:
  // `attach`: LocalMemoryService.Attach. `index`: where calls look for regions.
  StagingPool(StagingOptions options, std::function<SharedRegion::AttachCall()> attach,
              std::shared_ptr<RegionIndex> index);
  // REQUIRES: everything taken was given back.
  ~StagingPool();

  StagingPool(const StagingPool&) = delete;
  StagingPool& operator=(const StagingPool&) = delete;

  // Whether it makes sense to ask for so much now; else why not. Does not block.
  bool MayTake(int64_t bytes, std::string* why) const ABSL_LOCKS_EXCLUDED(mutex_);
  // One that is there already, if there is; else null, and `prepare` says whether Prepare should be
  // called, which others' Prepare and a first miss do without: a client of one call is faster by
  // the relay than by memory that has to be made. Does not block.
  std::shared_ptr<SharedRegion> TakeReady(int64_t bytes, bool* prepare) ABSL_LOCKS_EXCLUDED(mutex_);
  // Makes a region for whoever comes next. Blocks as Take does.
  void Prepare(int64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  // Nothing more is made: its end is near.
  void Close() ABSL_LOCKS_EXCLUDED(mutex_);

  // A region of at least `bytes` that some worker has, nobody else's until it is given back.
  // Blocks while memory is made and shown to workers: 0.3 s a GB, 10 s where a worker hangs.
  // Errors, whose words go into reports: FAILED_PRECONDITION if no worker of this machine takes
  // memory; RESOURCE_EXHAUSTED beyond max_bytes, or with too little free memory. Thread safe.
  absl::StatusOr<std::shared_ptr<SharedRegion>> Take(int64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  // `reusable`: no worker writes to it any more; else it is unmapped. Not from a thread of the
  // region, which it may wait for.
  void GiveBack(std::shared_ptr<SharedRegion> region, bool reusable) ABSL_LOCKS_EXCLUDED(mutex_);

  // Lets go of what has been idle for long.
  void Trim() ABSL_LOCKS_EXCLUDED(mutex_);

  int64_t bytes() const ABSL_LOCKS_EXCLUDED(mutex_);  // of all its regions

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
  int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // in use, idle, and being made
  std::vector<Idle> idle_ ABSL_GUARDED_BY(mutex_);
  int64_t misses_ ABSL_GUARDED_BY(mutex_) = 0;  // of TakeReady
  bool preparing_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool probed_ ABSL_GUARDED_BY(mutex_) = false;  // a worker took memory
  absl::Status refusal_ ABSL_GUARDED_BY(mutex_);
  absl::Time refused_until_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
};

// What this process may still take of the machine's memory or its own group's (cgroup v2);
// INT64_MAX if the system does not say.
int64_t AvailableMemoryBytes();

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_MEMORY_STAGING_POOL_H_
