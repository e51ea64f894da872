// LocalMemory: a worker's use of clients' memory: the listener that receives regions and the copies
// from and to them.
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
  int copy_threads = 2;  // per direction
  // Pins regions that are used repeatedly, at most max_pinned_bytes at a time (RegionPinner).
  // `device` must outlive the regions. If it is null or the limit is 0, nothing is pinned.
  Device* device = nullptr;
  int64_t max_pinned_bytes = 0;
  // Maximum bytes of imported CUDA allocations; 0: CUDA memory is not accepted. Requires a device
  // that can import memory.
  int64_t max_imported_bytes = 0;
  // Open sockets of clients. A ninth of them may be without a region.
  int64_t max_sockets = 576;
  absl::Duration report_interval = absl::Milliseconds(200);
};

struct LocalMemoryHooks {
  std::function<void(v1::JoinRequest)> send;  // to the coordinator; must not block
  // Called after Uploaded has been sent. Must not block.
  std::function<void(const OperationInfo&)> on_uploaded = [](const OperationInfo&) {};
  AwaitNoPeers await_no_peers = [](absl::Time) { return true; };  // for RegionPinner
  // For metrics.
  std::function<void(int64_t)> on_received_bytes;
  std::function<void(int64_t)> on_sent_bytes;
  std::function<void(int64_t)> on_imported_in_bytes;  // the same for CUDA memory
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
  // Returns the listener's errors: INVALID_ARGUMENT for an unusable path, or an error from errno.
  static absl::StatusOr<std::unique_ptr<LocalMemory>> Start(LocalMemoryOptions options,
                                                            LocalMemoryHooks hooks);
  // REQUIRES: every operation that was passed to Begin has ended.
  ~LocalMemory();

  // The coordinator's messages.
  void Expect(const v1::ExpectRegion& expect);
  void Forget(const v1::ForgetRegion& forget);
  // The coordinator is lost: releases all regions.
  void ForgetAll();

  // A region that is attached now; null if there is none with this id.
  std::shared_ptr<Region> Find(const std::string& region_id) const;

  // Starts copying for an operation whose tensors lie in regions. Reports the outcome to the
  // coordinator.
  void Begin(const std::shared_ptr<ShardOperation>& operation, const v1::Reserve& reserve)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Returns the copies of an inline operation, for the caller to make. Null if Begin() has to make
  // them, or to report why they are impossible. `host`: as in RegionTransfer::IsInline.
  std::shared_ptr<RegionTransfer> MakeInline(const std::shared_ptr<ShardOperation>& operation,
                                             const v1::Reserve& reserve, bool host);
  // Reports that the copies of an inline operation have failed.
  void ReportFailure(const OperationInfo& info, bool released, const std::string& why);

  // Releases the regions and stops calling hooks and sending reports. Later calls have no effect,
  // except that Begin fails. Idempotent; must not be called concurrently.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  LocalMemory(LocalMemoryOptions options, LocalMemoryHooks hooks);

  absl::StatusOr<std::shared_ptr<RegionTransfer>> Make(
      const std::shared_ptr<ShardOperation>& operation, const v1::Reserve& reserve);

  // The listener's hooks. They may run before Start has returned, so they must not use listener_.
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
  std::unique_ptr<RegionListener> listener_;  // set by Start
  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::set<std::shared_ptr<RegionTransfer>> transfers_ ABSL_GUARDED_BY(mutex_);
  CopyThreads up_;
  CopyThreads down_;
};

// Returns FOLDER/NAME.sock, with characters that file names cannot have replaced.
std::string LocalSocketPath(const std::string& folder, const std::string& worker_name);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_REGION_LOCAL_MEMORY_H_
