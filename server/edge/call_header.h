// The first message of a call, checked, and what is said of it in the log.
#ifndef RINGATTN_SERVER_EDGE_CALL_HEADER_H_
#define RINGATTN_SERVER_EDGE_CALL_HEADER_H_

#include <map>
#include <variant>

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/status.h>
#include <grpcpp/support/string_ref.h>

#include "common/base/limits.h"
#include "server/edge/header_translation.h"

namespace ringattn::server {

// What the header asks for, with a request_id made up if it has none; or the status that
// refuses it. Empties `message`. Work for a header of 4 MiB: milliseconds. Thread safe.
std::variant<HeaderRequest, grpc::Status> CheckHeader(Direction direction,
                                                      grpc::ByteBuffer* message,
                                                      const Limits& limits);

// With the client's W3C trace context, if it sent one, so that its traces lead here.
void LogArrival(const std::multimap<grpc::string_ref, grpc::string_ref>& metadata,
                const HeaderRequest& request);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_CALL_HEADER_H_
