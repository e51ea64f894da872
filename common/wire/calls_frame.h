// Frames: the CallRequests and CallResponses in the messages of AttentionService.Calls. A call's
// own message passes through without being parsed or written again.
//
// Tests: calls_frame_test.cc
#ifndef RINGATTN_COMMON_WIRE_CALLS_FRAME_H_
#define RINGATTN_COMMON_WIRE_CALLS_FRAME_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>
#include <grpcpp/support/status.h>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/wire/message_buffer.h"

namespace ringattn::wire {

// Whose message a frame carries. The values are the fields of CallRequest and CallResponse.
enum class CarriedKind { kForward = 4, kBackward = 5 };

// A CallRequest.
struct CallRequestFrame {
  uint64_t call = 0;
  // nullopt: none. Negative times count as zero.
  std::optional<absl::Duration> timeout = std::nullopt;
  std::string traceparent = {};
  bool cancels = false;  // it carries no message
  CarriedKind kind = CarriedKind::kForward;
  MessageBuffer message = {};  // a ForwardRequest or BackwardRequest
};

// A CallResponse.
struct CallResponseFrame {
  uint64_t call = 0;
  std::optional<grpc::Status> end = std::nullopt;  // the call's last message
  std::optional<CarriedKind> kind = std::nullopt;  // nullopt: it carries no message
  MessageBuffer message = {};                      // a ForwardResponse or BackwardResponse
};

// Returns a CallsRequest or CallsResponse with this frame. The carried message's slices are shared
// with the result. Thread safe.
grpc::ByteBuffer EncodeCallRequest(const CallRequestFrame& frame);
grpc::ByteBuffer EncodeCallResponse(const CallResponseFrame& frame);

// A message with several frames should not be larger.
inline constexpr size_t kJoinedBytes = 64 << 10;

// Removes elements from the front of the queue, in order, whose messages fit one message, and
// returns them; the first one at any size. Each has a member `MessageBuffer message`.
template <typename Element>
std::vector<Element> TakeJoined(std::deque<Element>& queue) {
  std::vector<Element> taken;
  for (size_t bytes = 0; !queue.empty(); queue.pop_front()) {
    bytes += queue.front().message.Length();
    if (!taken.empty() && bytes > kJoinedBytes) break;
    taken.push_back(std::move(queue.front()));
  }
  return taken;
}

// Returns one message with the frames of all `messages`, which are not empty, in their order. Small
// frames are copied, because gRPC takes longer for each slice. Thread safe.
MessageBuffer JoinMessages(std::vector<MessageBuffer> messages);

// Takes the frames out of a message one after another. Movable; thread compatible.
class FrameReader {
 public:
  // Errors: INTERNAL if gRPC cannot provide the message's bytes. The frames' messages share its
  // memory, or a copy of it if gRPC received it in several pieces.
  static absl::StatusOr<FrameReader> Of(const grpc::ByteBuffer& message);

  // Return the next frame; nullopt after the last. Only the frame is checked, not the message that
  // it carries. Errors: INVALID_ARGUMENT if the message has no frame, or if the frame is not legal
  // protobuf, carries several messages, or, for a request, neither a message nor a cancellation. No
  // call may follow an error.
  absl::StatusOr<std::optional<CallRequestFrame>> NextRequest();
  absl::StatusOr<std::optional<CallResponseFrame>> NextResponse();

 private:
  explicit FrameReader(grpc::Slice whole) : whole_(std::move(whole)) {}

  absl::StatusOr<std::optional<grpc::Slice>> Next();

  grpc::Slice whole_;
  size_t at_ = 0;  // where the next frame, or another field, begins
};

}  // namespace ringattn::wire

#endif  // RINGATTN_COMMON_WIRE_CALLS_FRAME_H_
