#include "client/stream/stream_messages.h"

#include <string>
#include <utility>
#include <vector>

#include "common/wire/grpc_slices.h"

namespace ringattn::client {
namespace {

template <typename Request>
std::string TransportMessage(const v1::TransportOptions& transport) {
  Request request;
  *request.mutable_header()->mutable_transport() = transport;
  return request.SerializeAsString();
}

template <typename Response>
absl::StatusOr<ControlMessage> ParseControl(grpc::ByteBuffer* buffer) {
  absl::StatusOr<Response> response = wire::ParseProto<Response>(buffer);
  if (!response.ok()) return response.status();
  ControlMessage message;
  if (response->has_accepted()) message.accepted = std::move(*response->mutable_accepted());
  if (response->has_progress()) message.progress = std::move(*response->mutable_progress());
  if (response->has_summary()) message.summary = std::move(*response->mutable_summary());
  if (response->has_single()) message.single = std::move(*response->mutable_single());
  return message;
}

}  // namespace

const char* MethodOf(CallKind kind) {
  return kind == CallKind::kForward ? "/ringattn.v1.AttentionService/Forward"
                                    : "/ringattn.v1.AttentionService/Backward";
}

wire::StreamMessage RequestTypeOf(CallKind kind) {
  return kind == CallKind::kForward ? wire::kForwardRequest : wire::kBackwardRequest;
}

wire::StreamMessage ResponseTypeOf(CallKind kind) {
  return kind == CallKind::kForward ? wire::kForwardResponse : wire::kBackwardResponse;
}

// Protobuf merges two concatenated messages into one.
grpc::ByteBuffer WithTransport(CallKind kind, const grpc::ByteBuffer& header,
                               const v1::TransportOptions& transport) {
  std::vector<grpc::Slice> slices;
  header.Dump(&slices);
  slices.emplace_back(kind == CallKind::kForward
                          ? TransportMessage<v1::ForwardRequest>(transport)
                          : TransportMessage<v1::BackwardRequest>(transport));
  return {slices.data(), slices.size()};
}

absl::StatusOr<ControlMessage> ParseControl(CallKind kind, grpc::ByteBuffer* buffer) {
  return kind == CallKind::kForward ? ParseControl<v1::ForwardResponse>(buffer)
                                    : ParseControl<v1::BackwardResponse>(buffer);
}

}  // namespace ringattn::client
