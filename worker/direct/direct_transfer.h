// DirectTransfer: the direct streams of one operation: its token, which streams are open, and the
// progress of all of them together.
#ifndef RINGATTN_WORKER_DIRECT_DIRECT_TRANSFER_H_
#define RINGATTN_WORKER_DIRECT_DIRECT_TRANSFER_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "worker/operation/operation_writers.h"
#include "worker/operation/shard_access.h"
#include "worker/operation/shard_operation.h"
#include "worker/operation/transfer_reporter.h"

namespace ringattn::worker {

// Called on gRPC's threads; must not block.
struct DirectHooks {
  // All outputs have been sent. Called once.
  std::function<void(const OperationInfo&)> on_delivered;
  // The transfer failed. `bad_chunk`: the client sent an invalid chunk. Called once.
  std::function<void(const OperationInfo&, bool bad_chunk, const std::string& why)> on_failed;
};

// Thread safe. Its leases keep it alive.
class DirectTransfer final : public OperationListener,
                             public std::enable_shared_from_this<DirectTransfer> {
 public:
  // `hooks` must outlive this object and its leases.
  DirectTransfer(const std::shared_ptr<ShardOperation>& operation, std::string token,
                 OperationWriters writers, const DirectHooks* hooks);
  ~DirectTransfer() override;

  // Registers as the operation's listener. Returns false if the operation already has one.
  bool Start();
  // Rejects further streams.
  void Forget() ABSL_LOCKS_EXCLUDED(mutex_);

  // Opens stream `part` of `parts` of a client. Calls `listener` until the lease is destroyed.
  // Errors:
  //   UNAUTHENTICATED   the token or part is wrong, expired or used; always the same message
  //   INVALID_ARGUMENT  parts, writer or max_chunk_bytes is out of range; the token stays usable
  absl::StatusOr<std::unique_ptr<ShardLease>> Open(const v1::OpenShard& open,
                                                   OperationListener* listener)
      ABSL_LOCKS_EXCLUDED(listeners_mutex_, mutex_);
  static absl::Status Refusal();

  TransferCounts progress() const ABSL_LOCKS_EXCLUDED(mutex_);

  const OperationInfo& info() const { return info_; }

  // OperationListener
  void OnOperationChanged() override ABSL_LOCKS_EXCLUDED(listeners_mutex_);

 private:
  class Lease;
  // Ranges of one output's shard.
  using Ranges = std::vector<WriterRange>;

  // The streams of one client, by part. Empty: none has been opened yet.
  using Opened = std::vector<bool>;
  struct Counts {
    bool forgotten = false;
    std::vector<Opened> opened;  // by writer
    uint32_t open = 0;           // streams that are open now
    uint32_t delivered = 0;      // streams that have sent all of their outputs
    int chunks = 0;              // chunks that are being copied
    int sends = 0;               // messages that gRPC has not sent yet
    int64_t received_bytes = 0;
    int64_t sent_bytes = 0;
    bool failed = false;
  };

  absl::Status Admit(const v1::OpenShard& open) ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns the ranges that a client needs of each output, by the outputs' order. Computed once for
  // each client: with short rows this takes milliseconds, which a run's end must not wait for.
  std::shared_ptr<const std::vector<Ranges>> RangesFor(uint32_t writer, ShardOperation& operation)
      ABSL_LOCKS_EXCLUDED(ranges_mutex_);
  // Whether all streams of all clients have been opened.
  bool AllOpened() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnDelivered() ABSL_LOCKS_EXCLUDED(mutex_);
  // Reports a failure once, unless the operation has already ended.
  void Fail(bool bad_chunk, const std::string& why) ABSL_LOCKS_EXCLUDED(mutex_);
  void Leave(OperationListener* listener, bool delivered)
      ABSL_LOCKS_EXCLUDED(listeners_mutex_, mutex_);

  const OperationInfo info_;
  // Weak: the memory is returned as soon as the operation is released and its streams are done.
  const std::weak_ptr<ShardOperation> operation_;
  const std::string token_;
  const OperationWriters writers_;
  const DirectHooks* const hooks_;

  absl::Mutex ranges_mutex_;
  std::vector<std::shared_ptr<const std::vector<Ranges>>> ranges_ ABSL_GUARDED_BY(ranges_mutex_);
  absl::Mutex listeners_mutex_;  // held while listeners are called
  std::set<OperationListener*> listeners_ ABSL_GUARDED_BY(listeners_mutex_);
  mutable absl::Mutex mutex_;
  Counts counts_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DIRECT_DIRECT_TRANSFER_H_
