// W3C Trace Context (https://www.w3.org/TR/trace-context): which trace of a client's a request
// belongs to. The service adds no spans of its own: it passes the client's traceparent on, to
// logs, reports and workers, so that whoever has the trace finds them. tracestate is not kept.
#ifndef RINGATTN_COMMON_OBSERVABILITY_TRACE_CONTEXT_H_
#define RINGATTN_COMMON_OBSERVABILITY_TRACE_CONTEXT_H_

#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace ringattn {

// The metadata key, and the key of the logs' field.
inline constexpr char kTraceparentKey[] = "traceparent";

// "00-<32 hex digits>-<16 hex digits>-<2 hex digits>" as it is to be passed on: of a later
// version what this one knows, and without flags that mean nothing yet. Nothing if `text` is
// not valid: upper case, zero ids, another length, version ff. Pure.
std::optional<std::string> ReadTraceparent(absl::string_view text);

// Of what ReadTraceparent returned; "" of "".
absl::string_view TraceIdOf(absl::string_view traceparent);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_OBSERVABILITY_TRACE_CONTEXT_H_
