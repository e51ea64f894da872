// TransferReporter: tells the coordinator of the transfers that go past it: that inputs and outputs
// are through, that one cannot go on, and a few times a second how far each is.
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

// Why a transfer cannot go on.
enum class TransferEnd : uint8_t {
  kHere,      // something of this worker's
  kReleased,  // the client let go of a region
  kBadChunk   // what the client sent is wrong
};

// Thread safe.
class TransferReporter {
 public:
  // `send` never blocks; called until Stop.
  TransferReporter(std::function<void(v1::JoinRequest)> send, absl::Duration interval);
  ~TransferReporter() { Stop(); }

  void Uploaded(const OperationInfo& info);
  void Delivered(const OperationInfo& info);
  void Failed(const OperationInfo& info, TransferEnd end, const std::string& why);

  // From now on `counts` says how far `transfer` is, whenever that has changed; not called any
  // more once Unwatch has returned. It must not call this.
  void Watch(const void* transfer, const OperationInfo& info,
             std::function<TransferCounts()> counts) ABSL_LOCKS_EXCLUDED(mutex_);
  void Unwatch(const void* transfer) ABSL_LOCKS_EXCLUDED(mutex_);

  // Nobody is looked at any more. Idempotent; once at a time.
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
