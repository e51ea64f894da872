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
#include "gtest/gtest.h"
#include "ringattn/v1/worker_control.grpc.pb.h"

namespace ringattn::worker {
namespace {

// Accepts every worker and releases none.
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
    while (stream->Read(&request)) {
    }
    return grpc::Status::OK;
  }

  const std::string& address() const { return address_; }
  int joins() const { return joins_; }

 private:
  std::atomic<int> joins_ = 0;
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

}  // namespace
}  // namespace ringattn::worker
