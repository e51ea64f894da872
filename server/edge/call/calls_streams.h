// CallsStreams: the open streams of AttentionService.Calls.
#ifndef RINGATTN_SERVER_EDGE_CALL_CALLS_STREAMS_H_
#define RINGATTN_SERVER_EDGE_CALL_CALLS_STREAMS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/base/limits.h"
#include "server/core/events/failure.h"

namespace ringattn::server {

// Thread safe. Calls streams under its lock; they must not call back.
class CallsStreams {
 public:
  class Stream {
   public:
    virtual ~Stream() = default;
    // The server is shutting down. The stream ends once its calls have ended.
    virtual void OnClosed() = 0;
  };

  explicit CallsStreams(const Limits& limits) : max_per_client_(limits.max_streams_per_client) {}

  // Adds the stream of this client (Caller::client) until Leave. Returns nullopt, or the failure
  // that rejects the stream.
  std::optional<Failure> Enter(Stream* stream, const std::string& client,
                               absl::Duration retry_after) ABSL_LOCKS_EXCLUDED(mutex_);
  // Has no effect on a stream that was not added.
  void Leave(Stream* stream) ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends all current and future streams.
  void Close() ABSL_LOCKS_EXCLUDED(mutex_);

  int64_t streams() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  const int64_t max_per_client_;
  mutable absl::Mutex mutex_;
  std::map<Stream*, std::string> streams_ ABSL_GUARDED_BY(mutex_);    // their clients
  std::map<std::string, int64_t> by_client_ ABSL_GUARDED_BY(mutex_);  // numbers of streams
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_CALL_CALLS_STREAMS_H_
