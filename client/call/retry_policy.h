// When a failed call is replayed, and when the client gives up. A pure function.
// Tests: retry_policy_test.cc.
#ifndef RINGATTN_CLIENT_CALL_RETRY_POLICY_H_
#define RINGATTN_CLIENT_CALL_RETRY_POLICY_H_

#include <optional>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/api/retry_options.h"

namespace ringattn::client {

struct FailedAttempt {
  absl::Status status;
  int replays_so_far = 0;
  bool server_ever_answered = false;  // in any attempt of this call
  absl::Duration elapsed;             // since the call started
  absl::Duration time_left;           // until its deadline; may be infinite
};

// Returns how long to wait before the replay, or nothing if the failure is final. Replayed are
//   ABORTED              unless a newer stream with the same request_id has taken over
//   UNAVAILABLE          unless the TLS handshake failed
//   RESOURCE_EXHAUSTED   if the server gave a RetryInfo
// The wait is at least that of RetryInfo and at least a backoff that doubles with each replay.
// `jitter` in [0, 1] shortens the backoff by up to half. A wait that would reach the deadline makes
// the failure final.
std::optional<absl::Duration> ReplayDelay(const RetryOptions& options, const FailedAttempt& attempt,
                                          double jitter);

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_CALL_RETRY_POLICY_H_
