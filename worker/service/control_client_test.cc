#include "worker/service/control_client.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <string>

#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/security/credentials.h"
#include "common/wire/join_status.h"
#include "gtest/gtest.h"
#include "ringattn/v1/worker_control.grpc.pb.h"

namespace ringattn::worker {
namespace {

// Accepts every worker and releases none, or replaces every worker immediately.
class Coordinator final : public v1::WorkerControlService::Service {
 public:
  Coordinator() {
    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", TransportSecurity().ServerCredentials(), &port);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    address_ = absl::StrCat("127.0.0.1:", port);
  }
  ~Coordinator() override { server_->Shutdown(std::chrono::system_clock::now()); }

  grpc::Status Join(grpc::ServerContext*,
                    grpc::ServerReaderWriter<v1::JoinResponse, v1::JoinRequest>* stream) override {
    ++joins_;
    v1::JoinRequest request;
    if (replaces_) {
      v1::JoinResponse response;
      response.mutable_registered();
      stream->Write(response);
      response.mutable_leave()->set_reason(kNameJoinedAgain);
      stream->Write(response);
      return grpc::Status(grpc::StatusCode::UNAVAILABLE, kNameJoinedAgain);
    }
    while (stream->Read(&request)) {
    }
    return grpc::Status::OK;
  }
  void Replace() { replaces_ = true; }

  const std::string& address() const { return address_; }
  int joins() const { return joins_; }

 private:
  std::atomic<int> joins_ = 0;
  std::atomic<bool> replaces_ = false;
  std::string address_;
  std::unique_ptr<grpc::Server> server_;
};

ControlHandler Deaf() {
  return {.on_message = [](const v1::JoinResponse&) {},
          .on_disconnected = [](const std::string&) {},
          .make_heartbeat = [] { return v1::Heartbeat(); },
          .on_leave = [](const std::string&) {}};
}

// Otherwise it would become a member without the coordinator knowing that it leaves.
TEST(ControlClientTest, DoesNotReconnectAfterLeave) {
  Coordinator coordinator;
  ControlClientOptions options;
  options.coordinator = coordinator.address();
  options.registration.set_name("worker");
  ControlClient client(options);
  client.Leave(absl::ZeroDuration());  // not connected, so no message is sent
  client.Start(Deaf());
  const absl::Time begin = absl::Now();
  client.Leave(absl::Seconds(20));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
  EXPECT_EQ(coordinator.joins(), 0);
  client.Stop();
}

// Two processes of one name must not end the ring several times a second.
TEST(ControlClientTest, WaitsAfterItsNameJoinedAgain) {
  Coordinator coordinator;
  coordinator.Replace();
  ControlClientOptions options;
  options.coordinator = coordinator.address();
  options.registration.set_name("worker");
  options.min_backoff = absl::Milliseconds(1);
  options.replaced_backoff = absl::Hours(1);
  std::atomic<int> disconnects = 0;
  ControlHandler handler = Deaf();
  handler.on_disconnected = [&](const std::string&) { ++disconnects; };
  ControlClient client(options);
  client.Start(handler);
  const absl::Time patience = absl::Now() + absl::Seconds(20);
  while (disconnects == 0 && absl::Now() < patience) absl::SleepFor(absl::Milliseconds(5));
  absl::SleepFor(absl::Milliseconds(300));
  EXPECT_EQ(coordinator.joins(), 1);
  client.Stop();  // ends the pause
}

}  // namespace
}  // namespace ringattn::worker
