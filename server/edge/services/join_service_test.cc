#include "server/edge/services/join_service.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include <grpcpp/create_channel.h>
#include <grpcpp/server_builder.h>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "common/base/version.h"
#include "common/security/credentials.h"
#include "common/security/secret.h"
#include "common/wire/join_status.h"
#include "common/wire/packed_messages.h"
#include "gtest/gtest.h"
#include "server/edge/testing/test_support.h"

namespace ringattn::server {
namespace {

// A worker that registers and disconnects at the same time. The disconnection must not overtake the
// registration, or the core would keep the worker until its heartbeat timeout.
void RegisterAndVanish(v1::WorkerControlService::Stub* stub) {
  grpc::ClientContext context;
  context.AddMetadata(kSecretMetadataKey, kTestSecret);
  const auto stream = stub->Join(&context);
  v1::JoinRequest request;
  request.mutable_register_()->set_name("flash");
  request.mutable_register_()->set_version(kVersion);
  stream->Write(request);
  context.TryCancel();
  (void)stream->Finish();
}

TEST(JoinServiceTest, AWorkerThatLeavesWhileJoiningIsRemoved) {
  TestCluster cluster(1);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      grpc::ChannelArguments arguments;
      arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
      const auto stub = v1::WorkerControlService::NewStub(
          grpc::CreateCustomChannel(cluster.server->addresses().control,
                                    TransportSecurity().ChannelCredentials(), arguments));
      for (int n = 0; n < 200; ++n) RegisterAndVanish(stub.get());
    });
  }
  for (std::thread& thread : threads) thread.join();
  // Long before its heartbeat timeout (5 s).
  const auto is_gone = [&] {
    const v1::Topology topology = cluster.topology();
    return std::none_of(topology.workers().begin(), topology.workers().end(),
                        [](const v1::WorkerInfo& worker) { return worker.name() == "flash"; });
  };
  EXPECT_TRUE(WaitUntil(is_gone, absl::Seconds(3)));
}

// The control stream of a worker that has sent its registration.
struct RegisteredStream {
  explicit RegisteredStream(TestCluster* cluster)
      : stub(v1::WorkerControlService::NewStub(grpc::CreateChannel(
            cluster->server->addresses().control, TransportSecurity().ChannelCredentials()))) {
    context.AddMetadata(kSecretMetadataKey, kTestSecret);
    stream = stub->Join(&context);
    v1::JoinRequest request;
    request.mutable_register_()->set_name("other");
    request.mutable_register_()->set_version(kVersion);
    EXPECT_TRUE(stream->Write(request));
  }

  std::unique_ptr<v1::WorkerControlService::Stub> stub;
  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReaderWriter<v1::JoinRequest, v1::JoinResponse>> stream;
};

TEST(JoinServiceTest, MessagesMayComeAsOne) {
  TestCluster cluster(1);
  RegisteredStream worker(&cluster);
  v1::JoinRequest request;
  request.mutable_heartbeat();
  request.add_more()->mutable_heartbeat();
  request.add_more()->mutable_leaving();
  ASSERT_TRUE(worker.stream->Write(request));
  bool released = false;
  v1::JoinResponse response;
  while (!released && worker.stream->Read(&response)) {
    wire::TakeApart(response, [&](const v1::JoinResponse& each, bool) {
      released |= each.leave().reason() == "it asked to leave";
    });
  }
  EXPECT_TRUE(released);
  worker.context.TryCancel();
  (void)worker.stream->Finish();
}

TEST(JoinServiceTest, StreamsEndWithTheReasonAtShutdown) {
  TestCluster cluster(1);
  RegisteredStream worker(&cluster);
  v1::JoinResponse response;
  ASSERT_TRUE(worker.stream->Read(&response));
  std::thread shutdown([&] { cluster.server->Shutdown(absl::Seconds(5)); });
  std::string last_reason;
  while (worker.stream->Read(&response)) last_reason = response.leave().reason();
  const grpc::Status status = worker.stream->Finish();
  shutdown.join();
  EXPECT_EQ(last_reason, kCoordinatorEnds);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(status.error_message(), kCoordinatorEnds);
}

// Passes the core's messages on, and ends the stream after the first, before the core's events have
// ended. A write that begins after them then finds a stream that has ended. BUILD overwrites freed
// memory.
class EndingSink final : public ActionSink {
 public:
  JoinService* service = nullptr;
  std::function<void()> end_stream;
  int messages = 0;

  void CarryOut(Action action, const Coordinator&) override {
    auto* send = std::get_if<SendToWorker>(&action);
    if (send == nullptr) return;
    service->Send(send->connection, std::move(send->message));
    if (messages++ == 0) end_stream();
  }
  void OnTick(absl::Time, const Coordinator&) override {}
};

TEST(JoinServiceTest, AStreamMayEndBeforeItsMessageIsWritten) {
  EndingSink sink;
  CoreLoop loop(CoordinatorConfig(), &sink);
  JoinService service(&loop, kTestSecret);
  sink.service = &service;
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", TransportSecurity().ServerCredentials(), &port);
  builder.RegisterService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  grpc::ClientContext context;
  context.AddMetadata(kSecretMetadataKey, kTestSecret);
  absl::Notification ended;
  sink.end_stream = [&] {
    context.TryCancel();
    server->Shutdown();  // returns when the call is done
    ended.Notify();
  };
  loop.Start();
  const auto stub = v1::WorkerControlService::NewStub(grpc::CreateChannel(
      absl::StrCat("127.0.0.1:", port), TransportSecurity().ChannelCredentials()));
  const auto stream = stub->Join(&context);
  v1::JoinRequest request;
  request.mutable_register_()->set_name("brief");
  request.mutable_register_()->set_version(kVersion);
  stream->Write(request);  // returns false if the sink has cancelled the call by then
  ASSERT_TRUE(ended.WaitForNotificationWithTimeout(absl::Seconds(20)));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  absl::Notification answered;  // the core goes on
  loop.Ask([&](const Coordinator&) { answered.Notify(); });
  EXPECT_TRUE(answered.WaitForNotificationWithTimeout(absl::Seconds(20)));
  loop.Stop();
  EXPECT_EQ(sink.messages, 1);
}

}  // namespace
}  // namespace ringattn::server
