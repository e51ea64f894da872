// LeaseHolds: the open HoldResiduals or HoldCaches streams and what each holds.
#ifndef RINGATTN_SERVER_EDGE_CALL_LEASE_HOLDS_H_
#define RINGATTN_SERVER_EDGE_CALL_LEASE_HOLDS_H_

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/base/limits.h"
#include "server/core/events/events.h"
#include "server/edge/access/stream_slots.h"

namespace ringattn::server {

// Leases to renew for `ttl`.
struct Renewal {
  std::vector<std::string> ids;  // handles of residuals, or ids of caches
  std::string principal;
  absl::Duration ttl;
};

// Thread safe. Performs no I/O. Calls streams under its lock; they must not call back.
class LeaseHolds {
 public:
  class Stream {
   public:
    virtual ~Stream() = default;
    // The server is shutting down.
    virtual void OnClosed() = 0;
  };
  // Returns whether a principal's residual or cache exists.
  using IsKept = std::function<bool(const std::string& id, const std::string& principal)>;

  // `method`: the RPC, for messages. Streams are bounded by max_residual_holds, and leases last for
  // residual_hold_ttl and residual_hold_grace.
  LeaseHolds(const Limits& limits, const char* method) : limits_(limits), method_(method) {}

  // Adds the stream until Leave. Returns nullopt, or the failure that rejects the stream.
  std::optional<Failure> Enter(Stream* stream, const Caller& caller, absl::Duration retry_after)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // REQUIRES: the stream was added.
  void Hold(Stream* stream, const std::vector<std::string>& ids) ABSL_LOCKS_EXCLUDED(mutex_);
  void Release(Stream* stream, const std::vector<std::string>& ids) ABSL_LOCKS_EXCLUDED(mutex_);
  // Removes the stream. Returns what it held and no other stream of the same principal holds;
  // nullopt if the stream was not added.
  std::optional<Renewal> Leave(Stream* stream) ABSL_LOCKS_EXCLUDED(mutex_);

  // Returns the leases to renew, by principal, every third of residual_hold_ttl. Forgets what has
  // ended.
  std::vector<Renewal> Due(absl::Time now, const IsKept& is_kept) ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends all current and future streams.
  void Close() ABSL_LOCKS_EXCLUDED(mutex_);

  int64_t streams() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Held {
    Caller caller;
    std::set<std::string> ids = {};
  };

  const Limits limits_;
  const char* const method_;
  mutable absl::Mutex mutex_;
  std::map<Stream*, Held> streams_ ABSL_GUARDED_BY(mutex_);
  absl::Time renewed_at_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_CALL_LEASE_HOLDS_H_
