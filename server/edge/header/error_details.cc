#include "server/edge/header/error_details.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "common/wire/durations.h"
#include "google/rpc/error_details.pb.h"

namespace ringattn::server {
namespace {

constexpr char kDomain[] = "ringattn";
constexpr size_t kMaxMessageBytes = 1024;
constexpr size_t kMaxFieldBytes = 256;

// Makes echoed request data printable, because metadata and protobuf strings must be ASCII or
// UTF-8.
std::string Printable(absl::string_view text, size_t max_bytes) {
  std::string result(text.substr(0, max_bytes));
  for (char& c : result) {
    if (c < 0x20 || c > 0x7e) c = '?';
  }
  if (text.size() > max_bytes) result += "...";
  return result;
}

void AddErrorInfo(absl::string_view reason, google::rpc::Status* status) {
  if (reason.empty()) return;
  google::rpc::ErrorInfo info;
  info.set_reason(Printable(reason, kMaxFieldBytes));
  info.set_domain(kDomain);
  status->add_details()->PackFrom(info);
}

void AddViolation(const Violation& violation, google::rpc::BadRequest* bad_request) {
  auto* added = bad_request->add_field_violations();
  added->set_field(Printable(violation.field, kMaxFieldBytes));
  added->set_description(Printable(violation.description, kMaxMessageBytes));
}

grpc::Status Finish(const google::rpc::Status& details) {
  return grpc::Status(static_cast<grpc::StatusCode>(details.code()), details.message(),
                      details.SerializeAsString());
}

}  // namespace

google::rpc::Status ToRpcStatus(const Failure& failure) {
  google::rpc::Status status;
  status.set_code(static_cast<int>(failure.code));
  status.set_message(Printable(failure.message, kMaxMessageBytes));
  AddErrorInfo(failure.reason, &status);
  if (failure.retry_after.has_value()) {
    google::rpc::RetryInfo retry;
    SetDuration(*failure.retry_after, retry.mutable_retry_delay());
    status.add_details()->PackFrom(retry);
  }
  if (failure.quota.has_value()) {
    google::rpc::QuotaFailure quota;
    auto* violation = quota.add_violations();
    violation->set_subject(Printable(failure.quota->subject, kMaxFieldBytes));
    violation->set_description(Printable(failure.quota->description, kMaxFieldBytes));
    status.add_details()->PackFrom(quota);
  }
  if (!failure.field.empty()) {
    google::rpc::BadRequest bad_request;
    // Removes the field from the message's start, since the violation names it.
    absl::string_view description = failure.message;
    absl::ConsumePrefix(&description, absl::StrCat(failure.field, ": "));
    AddViolation({failure.field, std::string(description)}, &bad_request);
    status.add_details()->PackFrom(bad_request);
  }
  return status;
}

grpc::Status ToGrpcStatus(const Failure& failure, const Limits&) {
  return Finish(ToRpcStatus(failure));
}

grpc::Status ToGrpcStatus(const Rejection& rejection, const Limits& limits) {
  google::rpc::Status status;
  status.set_code(static_cast<int>(rejection.code));
  status.set_message(Printable(rejection.ToStatus().message(), kMaxMessageBytes));
  const bool over_limit = rejection.code == absl::StatusCode::kResourceExhausted;
  AddErrorInfo(over_limit ? "OVER_LIMIT" : "INVALID_REQUEST", &status);
  google::rpc::BadRequest bad_request;
  // The type name and the framing of two nested messages take less than 100 bytes. The message is
  // sent twice, inside the details and next to them.
  const size_t budget = static_cast<size_t>(limits.max_error_detail_bytes) - status.ByteSizeLong() -
                        status.message().size() - 100;
  for (const Violation& violation : rejection.violations) {
    AddViolation(violation, &bad_request);
    if (bad_request.ByteSizeLong() > budget && bad_request.field_violations_size() > 1) {
      bad_request.mutable_field_violations()->RemoveLast();
      break;
    }
  }
  status.add_details()->PackFrom(bad_request);
  return Finish(status);
}

const char* CodeName(int code) {
  static constexpr const char* kNames[] = {"OK",
                                           "CANCELLED",
                                           "UNKNOWN",
                                           "INVALID_ARGUMENT",
                                           "DEADLINE_EXCEEDED",
                                           "NOT_FOUND",
                                           "ALREADY_EXISTS",
                                           "PERMISSION_DENIED",
                                           "RESOURCE_EXHAUSTED",
                                           "FAILED_PRECONDITION",
                                           "ABORTED",
                                           "OUT_OF_RANGE",
                                           "UNIMPLEMENTED",
                                           "INTERNAL",
                                           "UNAVAILABLE",
                                           "DATA_LOSS",
                                           "UNAUTHENTICATED"};
  return code >= 0 && code < static_cast<int>(std::size(kNames)) ? kNames[code] : "UNKNOWN";
}

}  // namespace ringattn::server
