// The messages of a call's stream. Forward and Backward have messages of the same form.
#ifndef RINGATTN_CLIENT_STREAM_STREAM_MESSAGES_H_
#define RINGATTN_CLIENT_STREAM_STREAM_MESSAGES_H_

#include <optional>

#include <grpcpp/support/byte_buffer.h>

#include "absl/status/statusor.h"
#include "common/wire/chunk_codec.h"
#include "ringattn/v1/attention.pb.h"

namespace ringattn::client {

enum class CallKind { kForward, kBackward };

// Returns the RPC's path.
const char* MethodOf(CallKind kind);
// The types of messages that carry chunks to the server and from it.
wire::StreamMessage RequestTypeOf(CallKind kind);
wire::StreamMessage ResponseTypeOf(CallKind kind);

// Returns the stream's first message: `header`, which is one without transport, with `transport`.
grpc::ByteBuffer WithTransport(CallKind kind, const grpc::ByteBuffer& header,
                               const v1::TransportOptions& transport);

// A message of a server other than a chunk.
struct ControlMessage {
  std::optional<v1::Accepted> accepted;
  std::optional<v1::Progress> progress;
  std::optional<v1::Summary> summary;
  std::optional<v1::SingleReply> single;
};
// Consumes `buffer`.
absl::StatusOr<ControlMessage> ParseControl(CallKind kind, grpc::ByteBuffer* buffer);

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_STREAM_STREAM_MESSAGES_H_
