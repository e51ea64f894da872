// PreparedCall: the handle of what Client::Prepare has made the workers keep.
#ifndef RINGATTN_CLIENT_API_PREPARED_CALL_H_
#define RINGATTN_CLIENT_API_PREPARED_CALL_H_

#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/api/call.h"

namespace ringattn::client {

struct PrepareOptions {
  // How long the workers keep the part if the library does not renew it, for example after a crash.
  // The library renews it three times as often. 0: the server's default, 30 s.
  absl::Duration ttl = absl::ZeroDuration();
  // Covers Prepare with its replays.
  absl::Duration deadline = absl::InfiniteDuration();
};

// While a copy of the handle and its client exist, the library renews the part. Afterwards it ends
// with its ttl. If the workers have evicted the part, or the ring has ended, the next renewal
// prepares it again. Copies refer to the same part. May outlive its client. Thread safe.
class PreparedCall {
 public:
  // The state that copies share. The library implements it. Thread safe.
  class State {
   public:
    virtual ~State() = default;
    virtual const CallReport& report() const = 0;
    virtual absl::Status trouble() const = 0;
  };

  explicit PreparedCall(std::shared_ptr<State> state) : state_(std::move(state)) {}

  // The report of Prepare. accepted.plan() has the members, and summary.prepared() what they keep.
  const CallReport& report() const { return state_->report(); }

  // Returns OK, or the error of the last renewal if it failed. The library tries again.
  absl::Status trouble() const { return state_->trouble(); }

 private:
  std::shared_ptr<State> state_;
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_API_PREPARED_CALL_H_
