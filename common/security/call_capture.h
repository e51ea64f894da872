// For tests: a server with one method, whose handler inspects each call.
#ifndef RINGATTN_COMMON_SECURITY_CALL_CAPTURE_H_
#define RINGATTN_COMMON_SECURITY_CALL_CAPTURE_H_

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include "gtest/gtest.h"

namespace ringattn {

// Not thread safe: one call at a time.
class CallCapture {
 public:
  using Answer = std::function<grpc::Status(const grpc::ServerContextBase& context)>;

  // Answers every call with the result of `answer`.
  CallCapture(std::shared_ptr<grpc::ServerCredentials> credentials, Answer answer)
      : service_(std::move(answer)) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", std::move(credentials), &port_);
    builder.RegisterCallbackGenericService(&service_);
    server_ = builder.BuildAndStart();
    EXPECT_NE(server_, nullptr);
  }

  // Makes one call with that metadata, after `prepare` has modified its context. Returns its
  // status.
  grpc::Status Call(std::shared_ptr<grpc::ChannelCredentials> credentials,
                    const std::vector<std::pair<std::string, std::string>>& metadata = {},
                    const std::function<void(grpc::ClientContext*)>& prepare = {}) const {
    const std::string address = "127.0.0.1:" + std::to_string(port_);
    grpc::GenericStub stub(grpc::CreateChannel(address, std::move(credentials)));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    for (const auto& [key, value] : metadata) context.AddMetadata(key, value);
    if (prepare) prepare(&context);
    grpc::CompletionQueue queue;
    const grpc::Slice nothing;
    const grpc::ByteBuffer request(&nothing, 1);
    grpc::ByteBuffer response;
    grpc::Status status;
    auto call = stub.PrepareUnaryCall(&context, "/test/Call", request, &queue);
    call->StartCall();
    call->Finish(&response, &status, nullptr);
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);  // bounded by the call's deadline
    return status;
  }

 private:
  class Service : public grpc::CallbackGenericService {
   public:
    explicit Service(Answer answer) : answer_(std::move(answer)) {}
    grpc::ServerGenericBidiReactor* CreateReactor(
        grpc::GenericCallbackServerContext* context) override {
      struct Reactor : grpc::ServerGenericBidiReactor {
        void OnDone() override { delete this; }
      };
      auto* reactor = new Reactor;
      reactor->Finish(answer_(*context));
      return reactor;
    }

   private:
    const Answer answer_;
  };

  Service service_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SECURITY_CALL_CAPTURE_H_
