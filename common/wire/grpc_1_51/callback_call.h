// CallbackCall: runs a function on one of gRPC's callback threads, like the callbacks of all calls.
#ifndef RINGATTN_COMMON_WIRE_GRPC_1_51_CALLBACK_CALL_H_
#define RINGATTN_COMMON_WIRE_GRPC_1_51_CALLBACK_CALL_H_

#include <functional>
#include <memory>
#include <utility>

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>

namespace ringattn::wire {

// Returns a channel without credentials. It never connects, and its calls fail at once.
inline std::shared_ptr<grpc::Channel> UnconnectedChannel() {
  return grpc::CreateCustomChannel("", nullptr, {});
}

// A call on such a channel. Lives until the function has done its work; the function may report
// that and then return.
class CallbackCall {
 public:
  // `stub`: of an unconnected channel.
  CallbackCall(grpc::GenericStub& stub, std::function<void()> function) : request_(&nothing_, 1) {
    stub.UnaryCall(&context_, "/callback", {}, &request_, &response_,
                   [function = std::move(function)](const grpc::Status&) { function(); });
  }

  CallbackCall(const CallbackCall&) = delete;
  CallbackCall& operator=(const CallbackCall&) = delete;

 private:
  grpc::ClientContext context_;
  const grpc::Slice nothing_;
  const grpc::ByteBuffer request_;
  grpc::ByteBuffer response_;
};

}  // namespace ringattn::wire

#endif  // RINGATTN_COMMON_WIRE_GRPC_1_51_CALLBACK_CALL_H_
