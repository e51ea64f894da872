// DirectStreams: the operations of this worker whose clients stream to it themselves, and who may
// open a stream for one. What becomes of them the coordinator is told.
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

// Why a stream was turned away, for metrics.
enum class StreamRefusal : uint8_t {
  kToken,  // good for nothing: missing, wrong, stale, used
  kParts   // with the right token
};
inline constexpr StreamRefusal kStreamRefusals[] = {StreamRefusal::kToken, StreamRefusal::kParts};
const char* StreamRefusalName(StreamRefusal refusal);

struct DirectStreamsOptions {
  absl::Duration report_interval = absl::Milliseconds(200);
};

struct DirectStreamsHooks {
  std::function<void(v1::JoinRequest)> send;  // to the coordinator; never blocks
  std::function<void(StreamRefusal)> on_refused;
};

// Thread safe.
class DirectStreams final : public ShardAccess {
 public:
  DirectStreams(DirectStreamsOptions options, DirectStreamsHooks hooks);
  // REQUIRES: no stream is open.
  ~DirectStreams() override = default;

  // From now on streams with reserve.token() may be opened for the operation.
  void Begin(const std::shared_ptr<ShardOperation>& operation, const v1::Reserve& reserve)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Its token opens nothing any more; open streams go on.
  void Forget(const std::string& operation_id, uint64_t generation) ABSL_LOCKS_EXCLUDED(mutex_);
  void ForgetAll() ABSL_LOCKS_EXCLUDED(mutex_);

  // ShardAccess. A call without an OpenShard that can be read is one with a wrong token.
  absl::StatusOr<std::unique_ptr<ShardLease>> Open(const std::optional<v1::OpenShard>& open,
                                                   OperationListener* listener) override
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  std::shared_ptr<DirectTransfer> Find(const std::string& token) ABSL_LOCKS_EXCLUDED(mutex_);

  const DirectStreamsHooks hooks_;
  DirectHooks transfer_hooks_;
  absl::Mutex mutex_;
  // By their tokens' digests.
  std::map<std::string, std::shared_ptr<DirectTransfer>> transfers_ ABSL_GUARDED_BY(mutex_);
  TransferReporter reporter_;  // last: its thread looks at transfers
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DIRECT_DIRECT_STREAMS_H_
