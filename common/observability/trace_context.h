// W3C Trace Context (https://www.w3.org/TR/trace-context): the client's trace of a request. The
// service adds no spans. It copies the client's traceparent to logs, reports and workers, so that
// users of the trace can find them. It drops tracestate.
#ifndef RINGATTN_COMMON_OBSERVABILITY_TRACE_CONTEXT_H_
#define RINGATTN_COMMON_OBSERVABILITY_TRACE_CONTEXT_H_

#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace ringattn {

// The metadata key, and the key of the log field.
inline constexpr char kTraceparentKey[] = "traceparent";

// Returns "00-<32 hex digits>-<16 hex digits>-<2 hex digits>" to pass on. Truncates later versions
// to the fields that this version knows, and clears undefined flags. Returns nullopt if `text` is
// invalid: upper case, zero ids, another length, version ff. Pure.
std::optional<std::string> ReadTraceparent(absl::string_view text);

// Returns the trace id of ReadTraceparent's result; "" for "".
absl::string_view TraceIdOf(absl::string_view traceparent);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_OBSERVABILITY_TRACE_CONTEXT_H_
