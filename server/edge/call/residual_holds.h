// ResidualHolds: the open HoldResiduals streams, and what each holds.
#ifndef RINGATTN_SERVER_EDGE_CALL_RESIDUAL_HOLDS_H_
#define RINGATTN_SERVER_EDGE_CALL_RESIDUAL_HOLDS_H_

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

// Thread safe. Without I/O; streams are called under its lock and must not call back.
class ResidualHolds {
 public:
  class Stream {
   public:
    virtual ~Stream() = default;
    // The server shuts down.
    virtual void OnClosed() = 0;
  };
  // Whether a residual is there for a principal.
  using IsKept = std::function<bool(const std::string& handle, const std::string& principal)>;

  explicit ResidualHolds(const Limits& limits) : limits_(limits) {}

  // Nothing: the stream is one of them until Leave. Else why it is turned away.
  std::optional<Failure> Enter(Stream* stream, const Caller& caller, absl::Duration retry_after)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // REQUIRES: it has entered.
  void Hold(Stream* stream, const std::vector<std::string>& handles) ABSL_LOCKS_EXCLUDED(mutex_);
  void Release(Stream* stream, const std::vector<std::string>& handles) ABSL_LOCKS_EXCLUDED(mutex_);
  // What it held and no other stream of the same principal does. Nothing if it has not entered.
  std::optional<ResidualsRenewed> Leave(Stream* stream) ABSL_LOCKS_EXCLUDED(mutex_);

  // Every third of residual_hold_ttl what is held, by principal, to be renewed; what is not kept
  // any more is forgotten.
  std::vector<ResidualsRenewed> Due(absl::Time now, const IsKept& is_kept)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends all streams and those to come.
  void Close() ABSL_LOCKS_EXCLUDED(mutex_);

  int64_t streams() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Held {
    Caller caller;
    std::set<std::string> handles = {};
  };

  const Limits limits_;
  mutable absl::Mutex mutex_;
  std::map<Stream*, Held> streams_ ABSL_GUARDED_BY(mutex_);
  absl::Time renewed_at_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_CALL_RESIDUAL_HOLDS_H_
