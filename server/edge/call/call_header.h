// Checks the first message of a call, and describes it for the log.
#ifndef RINGATTN_SERVER_EDGE_CALL_CALL_HEADER_H_
#define RINGATTN_SERVER_EDGE_CALL_CALL_HEADER_H_

#include <map>
#include <string>
#include <variant>

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/status.h>
#include <grpcpp/support/string_ref.h>

#include "common/base/limits.h"
#include "server/core/events/residual_view.h"
#include "server/edge/header/header_translation.h"

namespace ringattn::server {

// A header that names a residual, which only the core can resolve.
struct ResidualHeader {
  v1::BackwardRequest first;

  const std::string& handle() const { return first.header().residual_handle(); }
  const std::string& request_id() const { return first.header().request_id(); }
};

// Returns the checked request, with a generated request_id if it has none, or the status that
// rejects it. Consumes `message`. Takes milliseconds for a header of 4 MiB. Thread safe.
std::variant<HeaderRequest, grpc::Status, ResidualHeader> CheckHeader(Direction direction,
                                                                      grpc::ByteBuffer* message,
                                                                      const Limits& limits);
// Completes the check with the residual's Forward.
std::variant<HeaderRequest, grpc::Status> CompleteHeader(ResidualHeader header,
                                                         const ResidualView& residual,
                                                         const Limits& limits);

// Returns 128 random bits from the operating system, in hexadecimal.
std::string MakeResidualHandle();

// Returns the client's W3C trace context (trace_context.h). Returns an empty string if there is
// none, more than one, or an invalid one; the latter is logged and does not reject the request.
std::string TraceparentOf(const std::multimap<grpc::string_ref, grpc::string_ref>& metadata);
// The same for a client that sent this one; "": none.
std::string ValidTraceparent(const std::string& text);

void LogArrival(const HeaderRequest& request, const std::string& traceparent);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_CALL_CALL_HEADER_H_
