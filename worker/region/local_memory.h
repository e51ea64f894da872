// LocalMemory: what a worker has of clients' memory: the listener over which it comes, and the
// copies that go on from and to it.
#ifndef RINGATTN_WORKER_REGION_LOCAL_MEMORY_H_
#define RINGATTN_WORKER_REGION_LOCAL_MEMORY_H_

#include <sys/types.h>

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "ringattn/v1/worker_control.pb.h"
#include "worker/operation/transfer_reporter.h"
#include "worker/region/copy_threads.h"
#include "worker/region/region_listener.h"
#include "worker/region/region_pinner.h"
#include "worker/region/region_transfer.h"

namespace ringattn::worker {

struct LocalMemoryOptions {
  std::string socket_path;
  std::vector<uid_t> uids;
  int copy_threads = 2;  // each way
  // What pins regions that are used again, at most so many bytes at a time (RegionPinner). Outlives
  // the regions. Null, or 0 bytes: nothing is pinned.
  Device* device = nullptr;
  int64_t max_pinned_bytes = 0;
  // CUDA memory is taken too, at most so many bytes of allocations at a time; 0: none. `device` has
  // to import memory.
  int64_t max_imported_bytes = 0;
  absl::Duration report_interval = absl::Milliseconds(200);
};

struct LocalMemoryHooks {
  std::function<void(v1::JoinRequest)> send;  // to the coordinator; never blocks
  // For metrics.
  std::function<void(int64_t)> on_received_bytes;
  std::function<void(int64_t)> on_sent_bytes;
  std::function<void(int64_t)> on_imported_in_bytes;  // likewise from and to CUDA memory
  std::function<void(int64_t)> on_imported_out_bytes;
  std::function<void(absl::Duration)> on_downloaded;
  std::function<void(size_t regions)> on_regions;
  std::function<void(int64_t bytes)> on_pinned_bytes;
  std::function<void(int64_t bytes)> on_imported_bytes;
  std::function<void(AttachCode)> on_refused;
};

// Thread safe.
class LocalMemory {
 public:
  // The errors are the listener's: INVALID_ARGUMENT for a path of no use, or errno's.
  static absl::StatusOr<std::unique_ptr<LocalMemory>> Start(LocalMemoryOptions options,
                                                            LocalMemoryHooks hooks);
  // REQUIRES: every operation that was given to Begin has ended.
  ~LocalMemory();

  // The coordinator's words.
  void Expect(const v1::ExpectRegion& expect);
  void Forget(const v1::ForgetRegion& forget);
  // It is gone: nobody knows of the regions any more.
  void ForgetAll();

  // Begins to copy for an operation with places; `rank` of its ring. What becomes of it is told
  // the coordinator.
  void Begin(const std::shared_ptr<ShardOperation>& operation, const v1::Reserve& reserve, int rank)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // No more regions, no more hooks for them, no more reports; what is asked of it from then on has
  // no effect, and Begin fails. Idempotent; once at a time.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  LocalMemory(LocalMemoryOptions options, LocalMemoryHooks hooks);

  // The listener's hooks, which run beside Start: they ask nothing of the listener.
  void OnAttached(const std::shared_ptr<Region>& region, size_t regions);
  void OnGone(const std::shared_ptr<Region>& region, size_t regions) ABSL_LOCKS_EXCLUDED(mutex_);
  void SendRegion(const Region& region, bool attached);
  void OnOver(const RegionTransfer* transfer) ABSL_LOCKS_EXCLUDED(mutex_);
  void Populate(const std::shared_ptr<Region>& region, int64_t offset);

  const LocalMemoryOptions options_;
  const LocalMemoryHooks hooks_;
  TransferReporter reporter_;
  TransferHooks transfer_hooks_;
  std::unique_ptr<RegionPinner> pinner_;      // null: nothing is pinned
  std::unique_ptr<RegionListener> listener_;  // from Start on
  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::set<std::shared_ptr<RegionTransfer>> transfers_ ABSL_GUARDED_BY(mutex_);
  CopyThreads up_;
  CopyThreads down_;
};

// DIR/NAME.sock, the name without what a file's cannot have.
std::string LocalSocketPath(const std::string& folder, const std::string& worker_name);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_REGION_LOCAL_MEMORY_H_
