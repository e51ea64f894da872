// DirectTransfer: one operation whose client streams its tensors straight to this worker: the
// token that its streams show, which of them are open, and how far all of them together are.
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
#include "worker/operation/shard_access.h"
#include "worker/operation/shard_operation.h"
#include "worker/operation/transfer_reporter.h"

namespace ringattn::worker {

// Called on gRPC's threads; must not block.
struct DirectHooks {
  // All outputs have left: once.
  std::function<void(const OperationInfo&)> on_delivered;
  // It cannot go on; `bad_chunk`: because what the client sent is wrong. Once.
  std::function<void(const OperationInfo&, bool bad_chunk, const std::string& why)> on_failed;
};

// Thread safe. Its leases keep it.
class DirectTransfer final : public OperationListener,
                             public std::enable_shared_from_this<DirectTransfer> {
 public:
  // `hooks` outlive it and its leases.
  DirectTransfer(const std::shared_ptr<ShardOperation>& operation, std::string token,
                 const DirectHooks* hooks);
  ~DirectTransfer() override;

  // Hears of the operation from now on. False if another one does.
  bool Start();
  // Its token opens nothing any more.
  void Forget() ABSL_LOCKS_EXCLUDED(mutex_);

  // Stream `part` of `parts`; `listener` until the lease is gone. UNAUTHENTICATED, always with the
  // same words, for a token or a part that is good for nothing (any more); INVALID_ARGUMENT where
  // the token is right and the parts or max_chunk_bytes are not, which spends nothing.
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

  struct Counts {
    bool forgotten = false;
    uint32_t parts = 0;  // 0: no stream has come yet
    std::vector<bool> opened;
    uint32_t open = 0;       // now
    uint32_t delivered = 0;  // that have sent all of their part
    int chunks = 0;          // being taken
    int sends = 0;           // that the transport has not taken yet
    int64_t received_bytes = 0;
    int64_t sent_bytes = 0;
    bool failed = false;
  };

  absl::Status Admit(const v1::OpenShard& open) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnDelivered() ABSL_LOCKS_EXCLUDED(mutex_);
  // Somebody has to hear of it, unless the operation is over anyway.
  void Fail(bool bad_chunk, const std::string& why) ABSL_LOCKS_EXCLUDED(mutex_);
  void Leave(OperationListener* listener, bool delivered)
      ABSL_LOCKS_EXCLUDED(listeners_mutex_, mutex_);

  const OperationInfo info_;
  // Not owned: its memory goes back as soon as it is released and its streams are done.
  const std::weak_ptr<ShardOperation> operation_;
  const std::string token_;
  const DirectHooks* const hooks_;

  absl::Mutex listeners_mutex_;  // held while they are told
  std::set<OperationListener*> listeners_ ABSL_GUARDED_BY(listeners_mutex_);
  mutable absl::Mutex mutex_;
  Counts counts_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DIRECT_DIRECT_TRANSFER_H_
