// TransferReporter: reports transfers that bypass the coordinator to it: inputs complete, outputs
// delivered, failures, and the byte counts a few times per second.
#ifndef RINGATTN_WORKER_OPERATION_TRANSFER_REPORTER_H_
#define RINGATTN_WORKER_OPERATION_TRANSFER_REPORTER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "ringattn/v1/worker_control.pb.h"
#include "worker/operation/shard_operation.h"

namespace ringattn::worker {

struct TransferCounts {
  int64_t received_bytes = 0;
  int64_t sent_bytes = 0;
  bool waits_for_client = false;

  bool operator==(const TransferCounts&) const = default;
};

// Why a transfer failed.
enum class TransferEnd : uint8_t {
  kWorkerError,     // an error on this worker
  kRegionReleased,  // the client released a region
  kBadChunk         // the client sent an invalid chunk
};

// Thread safe.
class TransferReporter {
 public:
  // `send` must not block. It is not called after Stop.
  TransferReporter(std::function<void(v1::JoinRequest)> send, absl::Duration interval);
  ~TransferReporter() { Stop(); }

  void Uploaded(const OperationInfo& info);
  void Delivered(const OperationInfo& info);
  void Failed(const OperationInfo& info, TransferEnd end, const std::string& why);

  // From now on, reports `counts` whenever they change. `counts` is not called after Unwatch
  // returns, and it must not call this object.
  void Watch(const void* transfer, const OperationInfo& info,
             std::function<TransferCounts()> counts) ABSL_LOCKS_EXCLUDED(mutex_);
  void Unwatch(const void* transfer) ABSL_LOCKS_EXCLUDED(mutex_);

  // Stops reporting. Idempotent; must not be called concurrently.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Watched {
    OperationInfo info;
    std::function<TransferCounts()> counts;
    TransferCounts reported;
  };

  void Run() ABSL_LOCKS_EXCLUDED(mutex_);

  const std::function<void(v1::JoinRequest)> send_;
  const absl::Duration interval_;
  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<const void*, Watched> watched_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_OPERATION_TRANSFER_REPORTER_H_
