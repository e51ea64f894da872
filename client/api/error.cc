#include "client/api/error.h"

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace ringattn::client {
namespace {

constexpr absl::string_view kPayloadUrl = "type.googleapis.com/google.rpc.Status";

// What gRPC 1.51 and OpenSSL say, and what it means here.
constexpr struct {
  absl::string_view says;
  absl::string_view means;
} kTlsFailures[] = {
    {"certificate verify failed",
     "the server's certificate leads to none of the authorities given (tls_ca), or is not valid "
     "today"},
    {"Hostname Verification Check failed",
     "the server's certificate is for another name than the one dialled (tls_server_name)"},
    {"wrong version number", "the server speaks plain text, not TLS (tls_ca)"},
    {"ls handshake failed", "TLS could not be agreed on"},
};

absl::Status ExplainConnecting(const std::string& message) {
  for (const auto& [says, means] : kTlsFailures) {
    if (!absl::StrContains(message, says)) continue;
    google::rpc::ErrorInfo info;
    info.set_reason(kTlsHandshakeFailed);
    info.set_domain("ringattn");
    google::rpc::Status wire;
    wire.add_details()->PackFrom(info);
    absl::Status status = absl::UnavailableError(absl::StrCat(means, ": ", message));
    status.SetPayload(kPayloadUrl, absl::Cord(wire.SerializeAsString()));
    return status;
  }
  // Of a certificate that the server refuses, and of plain text where it wants TLS, no more can
  // be seen from here; and a server that just ends looks the same.
  const bool closed = absl::StrContains(message, "Socket closed") ||
                      absl::StrContains(message, "Connection reset") ||
                      absl::StrContains(message, "Broken pipe");
  if (closed && absl::StrContains(message, "failed to connect")) {
    return absl::UnavailableError(absl::StrCat(
        message, " (it may want TLS, or another client certificate: tls_ca, tls_cert)"));
  }
  return absl::UnavailableError(message);
}

}  // namespace

absl::Status MakeError(absl::StatusCode code, absl::string_view message,
                       const std::vector<FieldViolation>& violations) {
  google::rpc::BadRequest bad_request;
  for (const FieldViolation& violation : violations) {
    auto* field = bad_request.add_field_violations();
    field->set_field(violation.field);
    field->set_description(violation.description);
  }
  google::rpc::Status wire;
  wire.add_details()->PackFrom(bad_request);
  absl::Status status(code, message);
  status.SetPayload(kPayloadUrl, absl::Cord(wire.SerializeAsString()));
  return status;
}

absl::Status TransportUnavailable(absl::string_view why) {
  google::rpc::ErrorInfo info;
  info.set_reason("TRANSPORT_UNAVAILABLE");
  info.set_domain("ringattn");
  google::rpc::Status wire;
  wire.add_details()->PackFrom(info);
  absl::Status status =
      absl::FailedPreconditionError(absl::StrCat("no direct stream, which is required: ", why));
  status.SetPayload(kPayloadUrl, absl::Cord(wire.SerializeAsString()));
  return status;
}

absl::Status WithMessage(const absl::Status& status, absl::string_view message) {
  absl::Status changed(status.code(), message);
  status.ForEachPayload(
      [&](absl::string_view url, const absl::Cord& payload) { changed.SetPayload(url, payload); });
  return changed;
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE && status.error_details().empty()) {
    return ExplainConnecting(status.error_message());
  }
  absl::Status converted(static_cast<absl::StatusCode>(status.error_code()),
                         status.error_message());
  if (!status.ok() && !status.error_details().empty()) {
    converted.SetPayload(kPayloadUrl, absl::Cord(status.error_details()));
  }
  return converted;
}

ErrorDetails DetailsOf(const absl::Status& status) {
  ErrorDetails details;
  const absl::optional<absl::Cord> payload = status.GetPayload(kPayloadUrl);
  google::rpc::Status wire;
  if (!payload.has_value() || !wire.ParseFromString(std::string(*payload))) return details;
  for (const google::protobuf::Any& any : wire.details()) {
    google::rpc::BadRequest bad_request;
    google::rpc::ErrorInfo info;
    google::rpc::RetryInfo retry;
    if (any.UnpackTo(&bad_request)) {
      for (const auto& violation : bad_request.field_violations()) {
        details.violations.push_back({violation.field(), violation.description()});
      }
    } else if (any.UnpackTo(&info)) {
      details.reason = info.reason();
      details.metadata.insert(info.metadata().begin(), info.metadata().end());
    } else if (any.UnpackTo(&retry)) {
      details.retry_delay = absl::Seconds(retry.retry_delay().seconds()) +
                            absl::Nanoseconds(retry.retry_delay().nanos());
    }
  }
  return details;
}

bool IsResidualGone(const absl::Status& status) {
  if (!absl::IsFailedPrecondition(status) && !absl::IsNotFound(status)) return false;
  const std::string reason = DetailsOf(status).reason;
  return reason == "RESIDUAL_LOST" || reason == "RESIDUAL_EXPIRED" ||
         reason == "RESIDUAL_CONSUMED" || reason == "RESIDUAL_NOT_FOUND";
}

std::string FormatError(const absl::Status& status) {
  std::string text = absl::StrCat(absl::StatusCodeToString(status.code()), ": ", status.message());
  const ErrorDetails details = DetailsOf(status);
  for (const FieldViolation& violation : details.violations) {
    absl::StrAppend(&text, "\n  ", violation.field, ": ", violation.description);
  }
  if (!details.reason.empty()) absl::StrAppend(&text, "\n  reason: ", details.reason);
  return text;
}

}  // namespace ringattn::client
