#include "common/kv/kv_error.h"

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"

namespace ringattn {
namespace {

constexpr char kReasonUrl[] = "ringattn/error_info_reason";

}  // namespace

absl::Status KvError(absl::StatusCode code, absl::string_view reason, absl::string_view message) {
  absl::Status status(code, message);
  status.SetPayload(kReasonUrl, absl::Cord(reason));
  return status;
}

absl::Status KvOverLimit(absl::string_view field, uint64_t value, int64_t limit) {
  return absl::ResourceExhaustedError(
      absl::StrCat(field, " is ", value, "; the maximum is ", limit));
}

std::string KvErrorReason(const absl::Status& status) {
  const auto payload = status.GetPayload(kReasonUrl);
  return payload.has_value() ? std::string(*payload) : std::string();
}

}  // namespace ringattn
