// Errors as callers see them: an absl::Status with the server's code and message,
// and the google.rpc details as its payload.
#ifndef RINGATTN_CLIENT_API_ERROR_H_
#define RINGATTN_CLIENT_API_ERROR_H_

#include <map>
#include <optional>
#include <string>
#include <vector>

#include <grpcpp/support/status.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace ringattn::client {

// ErrorInfo.reason of an UNAVAILABLE that the library itself gives: TLS could not come about,
// because of what one end shows or expects. Another attempt would end alike.
inline constexpr char kTlsHandshakeFailed[] = "TLS_HANDSHAKE_FAILED";

struct FieldViolation {
  std::string field;  // "options.softcap"
  std::string description;
};

struct ErrorDetails {
  std::vector<FieldViolation> violations;
  std::string reason;  // ErrorInfo.reason, e.g. "WORKER_LOST"; empty if there is none
  std::map<std::string, std::string> metadata;
  std::optional<absl::Duration> retry_delay;
};

// A status with BadRequest violations, as a server would send it.
absl::Status MakeError(absl::StatusCode code, absl::string_view message,
                       const std::vector<FieldViolation>& violations);

// FAILED_PRECONDITION, TRANSPORT_UNAVAILABLE, as a coordinator would send it.
absl::Status TransportUnavailable(absl::string_view why);

// The same code and details with another message.
absl::Status WithMessage(const absl::Status& status, absl::string_view message);

// Keeps code, message and details. What gRPC says of a failed TLS handshake is put into words
// that name the option to look at, and typed (kTlsHandshakeFailed).
absl::Status FromGrpcStatus(const grpc::Status& status);

// What the status carries; empty if it carries nothing or nothing readable.
ErrorDetails DetailsOf(const absl::Status& status);

// A Backward cannot read its residual: it was lost, has expired or was consumed, or nobody knows
// it. With the tensors themselves the call may succeed.
bool IsResidualGone(const absl::Status& status);

// For people: "INVALID_ARGUMENT: message", a line per violation, and the reason.
std::string FormatError(const absl::Status& status);

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_API_ERROR_H_
