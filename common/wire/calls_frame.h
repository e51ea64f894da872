// The messages of AttentionService.Calls around those of their calls. A call's own message passes
// through without being parsed or written again.
//
// Tests: calls_frame_test.cc
#ifndef RINGATTN_COMMON_WIRE_CALLS_FRAME_H_
#define RINGATTN_COMMON_WIRE_CALLS_FRAME_H_

#include <cstdint>
#include <optional>
#include <string>

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/status.h>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace ringattn::wire {

// Whose message a frame carries. The values are the fields of CallsRequest and CallsResponse.
enum class CarriedKind { kForward = 4, kBackward = 5 };

// A CallsRequest.
struct CallsRequestFrame {
  uint64_t call = 0;
  // nullopt: none. Negative times count as zero.
  std::optional<absl::Duration> timeout = std::nullopt;
  std::string traceparent = {};
  bool cancels = false;  // it carries no message
  CarriedKind kind = CarriedKind::kForward;
  grpc::ByteBuffer message = {};  // a ForwardRequest or BackwardRequest
};

// A CallsResponse.
struct CallsResponseFrame {
  uint64_t call = 0;
  std::optional<grpc::Status> end = std::nullopt;  // the call's last message
  std::optional<CarriedKind> kind = std::nullopt;  // nullopt: it carries no message
  grpc::ByteBuffer message = {};                   // a ForwardResponse or BackwardResponse
};

// The carried message's slices are shared with the result. All functions are thread safe.
grpc::ByteBuffer EncodeCallsRequest(const CallsRequestFrame& frame);
grpc::ByteBuffer EncodeCallsResponse(const CallsResponseFrame& frame);

// The carried message shares the memory of `buffer`, or a copy of it if gRPC received it in several
// pieces. Only the frame is checked, not the carried message. Errors: INVALID_ARGUMENT if the frame
// is not legal protobuf, carries several messages, or, for a request, neither a message nor a
// cancellation; INTERNAL if gRPC cannot provide the buffer's bytes.
absl::StatusOr<CallsRequestFrame> DecodeCallsRequest(const grpc::ByteBuffer& buffer);
absl::StatusOr<CallsResponseFrame> DecodeCallsResponse(const grpc::ByteBuffer& buffer);

}  // namespace ringattn::wire

#endif  // RINGATTN_COMMON_WIRE_CALLS_FRAME_H_
