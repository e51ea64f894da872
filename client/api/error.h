// Errors as callers see them: an absl::Status with the server's code and message. The google.rpc
// details are its payload.
#ifndef RINGATTN_CLIENT_API_ERROR_H_
#define RINGATTN_CLIENT_API_ERROR_H_

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace ringattn::client {

// ErrorInfo.reason of an UNAVAILABLE that the library itself returns: the TLS handshake failed
// because of the certificates or settings of one side. A retry would fail in the same way.
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

// Returns the details that `status` carries; empty if there are none or they are unreadable.
ErrorDetails DetailsOf(const absl::Status& status);

// Returns true if a Backward failed because its residual no longer exists: it was lost, expired or
// consumed, or never existed. The same call with its tensors may succeed.
bool IsResidualGone(const absl::Status& status);

// Returns text for people: "INVALID_ARGUMENT: message", a line per violation, and the reason.
std::string FormatError(const absl::Status& status);

// --- For the library and its tools ---------------------------------------------

// Returns a status with BadRequest violations, as a server would send it.
absl::Status MakeError(absl::StatusCode code, absl::string_view message,
                       const std::vector<FieldViolation>& violations);

// Returns a status with an ErrorInfo of the given reason.
absl::Status MakeErrorWithReason(absl::StatusCode code, absl::string_view message,
                                 absl::string_view reason);

// Attaches a serialized google.rpc.Status to `status`.
void SetDetails(const std::string& serialized, absl::Status* status);

// Returns FAILED_PRECONDITION, TRANSPORT_UNAVAILABLE, as a coordinator would send it.
absl::Status TransportUnavailable(absl::string_view why);

// Returns the same code and details with another message.
absl::Status WithMessage(const absl::Status& status, absl::string_view message);

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_API_ERROR_H_
