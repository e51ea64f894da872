// When a failed call is sent again, and when it is given up. A pure decision.
#ifndef RINGATTN_CLIENT_CALL_RETRY_POLICY_H_
#define RINGATTN_CLIENT_CALL_RETRY_POLICY_H_

#include <optional>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace ringattn::client {

struct RetryOptions {
  // A ring that lost a worker is back within seconds; ten replays with these pauses
  // wait about half a minute for it.
  int max_replays = 10;
  absl::Duration initial_backoff = absl::Milliseconds(200);
  absl::Duration max_backoff = absl::Seconds(5);
  // A server that has never answered is given up sooner: likely the address is wrong.
  absl::Duration connect_timeout = absl::Seconds(5);
};

struct FailedAttempt {
  absl::Status status;
  int replays_so_far = 0;
  bool server_ever_answered = false;  // in any attempt of this call
  absl::Duration elapsed;             // since the call began
  absl::Duration time_left;           // until its deadline; may be infinite
};

// How long to wait before the replay; nothing if the failure is final. Replayed are
//   ABORTED              unless a newer stream with the same request_id took over
//   UNAVAILABLE          unless TLS could not come about
//   RESOURCE_EXHAUSTED   if the server said when to come back
// after at least what RetryInfo asks for and a backoff that doubles, `jitter` in
// [0, 1] taking up to half of it off. A wait that would reach the deadline is final.
std::optional<absl::Duration> ReplayDelay(const RetryOptions& options, const FailedAttempt& attempt,
                                          double jitter);

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_CALL_RETRY_POLICY_H_
