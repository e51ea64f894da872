// DirectStreams: the operations of this worker that clients stream to directly. Checks who may open
// a stream and reports the transfers to the coordinator.
#ifndef RINGATTN_WORKER_DIRECT_DIRECT_STREAMS_H_
#define RINGATTN_WORKER_DIRECT_DIRECT_STREAMS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "ringattn/v1/worker_control.pb.h"
#include "worker/direct/direct_transfer.h"
#include "worker/operation/shard_access.h"
#include "worker/operation/transfer_reporter.h"

namespace ringattn::worker {

// Why a stream was rejected, for metrics.
enum class StreamRefusal : uint8_t {
  kToken,  // token missing, wrong, expired or already used
  kParts   // token valid, but parts or chunk size out of range
};
inline constexpr StreamRefusal kStreamRefusals[] = {StreamRefusal::kToken, StreamRefusal::kParts};
const char* StreamRefusalName(StreamRefusal refusal);

struct DirectStreamsOptions {
  absl::Duration report_interval = absl::Milliseconds(200);
};

struct DirectStreamsHooks {
  std::function<void(v1::JoinRequest)> send;  // to the coordinator; must not block
  std::function<void(StreamRefusal)> on_refused;
};

// Thread safe.
class DirectStreams final : public ShardAccess {
 public:
  DirectStreams(DirectStreamsOptions options, DirectStreamsHooks hooks);
  // REQUIRES: no stream is open.
  ~DirectStreams() override = default;

  // Accepts streams with reserve.token() for the operation from now on.
  void Begin(const std::shared_ptr<ShardOperation>& operation, const v1::Reserve& reserve)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Rejects further streams of the operation. Open streams continue.
  void Forget(const std::string& operation_id, uint64_t generation) ABSL_LOCKS_EXCLUDED(mutex_);
  void ForgetAll() ABSL_LOCKS_EXCLUDED(mutex_);

  // ShardAccess. A call without a readable OpenShard is rejected like one with a wrong token.
  absl::StatusOr<std::unique_ptr<ShardLease>> Open(const std::optional<v1::OpenShard>& open,
                                                   OperationListener* listener) override
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  std::shared_ptr<DirectTransfer> Find(const std::string& token) ABSL_LOCKS_EXCLUDED(mutex_);

  const DirectStreamsHooks hooks_;
  DirectHooks transfer_hooks_;
  absl::Mutex mutex_;
  // by the digest of the token
  std::map<std::string, std::shared_ptr<DirectTransfer>> transfers_ ABSL_GUARDED_BY(mutex_);
  TransferReporter reporter_;  // last: its thread reads transfers
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DIRECT_DIRECT_STREAMS_H_
