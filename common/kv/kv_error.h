// Errors of K/V caches: absl::Status with the ErrorInfo.reason that kv_cache.proto lists.
// Tests: step_log_test.
#ifndef RINGATTN_COMMON_KV_KV_ERROR_H_
#define RINGATTN_COMMON_KV_KV_ERROR_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace ringattn {

// ErrorInfo.domain of every error.
inline constexpr char kKvErrorDomain[] = "ringattn";

// `reason`: e.g. "STEP_ORDER". It travels in a payload of the status.
absl::Status KvError(absl::StatusCode code, absl::string_view reason, absl::string_view message);

// RESOURCE_EXHAUSTED: "FIELD is VALUE; the maximum is LIMIT".
absl::Status KvOverLimit(absl::string_view field, uint64_t value, int64_t limit);

// Empty for OK and for a status without a reason.
std::string KvErrorReason(const absl::Status& status);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_KV_KV_ERROR_H_
