// The first message of a call, checked, and what is said of it in the log.
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

// A header that only the core can complete: it names a residual.
struct ResidualHeader {
  v1::BackwardRequest first;

  const std::string& handle() const { return first.header().residual_handle(); }
  const std::string& request_id() const { return first.header().request_id(); }
};

// What the header asks for, with a request_id made up if it has none; or the status that
// refuses it. Empties `message`. Work for a header of 4 MiB: milliseconds. Thread safe.
std::variant<HeaderRequest, grpc::Status, ResidualHeader> CheckHeader(Direction direction,
                                                                      grpc::ByteBuffer* message,
                                                                      const Limits& limits);
// The rest of it, once it is known what the residual is of.
std::variant<HeaderRequest, grpc::Status> CompleteHeader(ResidualHeader header,
                                                         const ResidualView& residual,
                                                         const Limits& limits);

// 128 bits from the operating system, in hexadecimal: nobody can guess it.
std::string MakeResidualHandle();

// The client's W3C trace context (trace_context.h); empty if it sent none, several, or one that
// is not valid, which the log then says: a trace that ends here is the client's to mend, and no
// reason to refuse its request.
std::string TraceparentOf(const std::multimap<grpc::string_ref, grpc::string_ref>& metadata);

void LogArrival(const HeaderRequest& request, const std::string& traceparent);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_CALL_CALL_HEADER_H_
