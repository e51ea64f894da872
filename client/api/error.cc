#include "client/api/error.h"

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace ringattn::client {
namespace {

constexpr absl::string_view kPayloadUrl = "type.googleapis.com/google.rpc.Status";

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
  SetDetails(wire.SerializeAsString(), &status);
  return status;
}

absl::Status MakeErrorWithReason(absl::StatusCode code, absl::string_view message,
                                 absl::string_view reason) {
  google::rpc::ErrorInfo info;
  info.set_reason(std::string(reason));
  info.set_domain("ringattn");
  google::rpc::Status wire;
  wire.add_details()->PackFrom(info);
  absl::Status status(code, message);
  SetDetails(wire.SerializeAsString(), &status);
  return status;
}

void SetDetails(const std::string& serialized, absl::Status* status) {
  status->SetPayload(kPayloadUrl, absl::Cord(serialized));
}

absl::Status TransportUnavailable(absl::string_view why) {
  return MakeErrorWithReason(absl::StatusCode::kFailedPrecondition,
                             absl::StrCat("no direct stream, which is required: ", why),
                             "TRANSPORT_UNAVAILABLE");
}

absl::Status WithMessage(const absl::Status& status, absl::string_view message) {
  absl::Status changed(status.code(), message);
  status.ForEachPayload(
      [&](absl::string_view url, const absl::Cord& payload) { changed.SetPayload(url, payload); });
  return changed;
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
