// Failure: an error as the client receives it, and the ids of streams.
#ifndef RINGATTN_SERVER_CORE_EVENTS_FAILURE_H_
#define RINGATTN_SERVER_CORE_EVENTS_FAILURE_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace ringattn::server {

// One open Join stream. Never reused.
using ConnectionId = uint64_t;
// One open Forward or Backward stream of a client. Never reused.
using StreamId = uint64_t;

// A failure as the client receives it. The edge adds the google.rpc details.
struct Failure {
  absl::StatusCode code = absl::StatusCode::kUnknown;
  std::string message;
  std::string reason;  // ErrorInfo.reason, UPPER_SNAKE_CASE, e.g. "WORKER_LOST"
  std::optional<absl::Duration> retry_after;  // RetryInfo
  std::string field;                          // BadRequest.field_violations.field; usually empty
  struct Quota {
    std::string subject;      // "client:NAME"
    std::string description;  // the quota's name and its figures
  };
  std::optional<Quota> quota;  // QuotaFailure: one of the client's limits
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_EVENTS_FAILURE_H_
