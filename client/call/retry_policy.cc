#include "client/call/retry_policy.h"

#include <algorithm>
#include <cmath>

#include "client/api/error.h"

namespace ringattn::client {
namespace {

bool MayReplay(const absl::Status& status, const ErrorDetails& details) {
  switch (status.code()) {
    case absl::StatusCode::kAborted:
      return details.reason != "SUPERSEDED";
    case absl::StatusCode::kUnavailable:
      return details.reason != kTlsHandshakeFailed;
    case absl::StatusCode::kResourceExhausted:
      return details.retry_delay.has_value();
    default:
      return false;
  }
}

}  // namespace

std::optional<absl::Duration> ReplayDelay(const RetryOptions& options, const FailedAttempt& attempt,
                                          double jitter) {
  const ErrorDetails details = DetailsOf(attempt.status);
  if (!MayReplay(attempt.status, details)) return std::nullopt;
  if (attempt.replays_so_far >= options.max_replays) return std::nullopt;
  if (!attempt.server_ever_answered && attempt.elapsed >= options.connect_timeout) {
    return std::nullopt;
  }
  const double factor = std::exp2(std::min(attempt.replays_so_far, 30));
  const absl::Duration backoff = std::min(options.initial_backoff * factor, options.max_backoff);
  const absl::Duration delay =
      std::max(backoff * (1.0 - jitter / 2), details.retry_delay.value_or(absl::ZeroDuration()));
  if (delay >= attempt.time_left) return std::nullopt;
  return delay;
}

}  // namespace ringattn::client
