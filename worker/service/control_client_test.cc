#include "worker/service/control_client.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "common/security/credentials.h"
#include "common/wire/join_status.h"
#include "common/wire/packed_messages.h"
#include "gtest/gtest.h"
#include "ringattn/v1/worker_control.grpc.pb.h"

namespace ringattn::worker {
namespace {

// A coordinator that listens. Derived classes serve Join.
class ListeningCoordinator : public v1::WorkerControlService::Service {
 public:
  ListeningCoordinator() {
    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", TransportSecurity().ServerCredentials(), &port);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    address_ = absl::StrCat("127.0.0.1:", port);
  }

  const std::string& address() const { return address_; }

 protected:
  using Stream = grpc::ServerReaderWriter<v1::JoinResponse, v1::JoinRequest>;

  // Derived classes call it in their destructors, because Join uses their members.
  void Shutdown() { server_->Shutdown(std::chrono::system_clock::now()); }

 private:
  std::string address_;
  std::unique_ptr<grpc::Server> server_;
};

// Accepts every worker and releases none, or replaces every worker immediately.
class Coordinator final : public ListeningCoordinator {
 public:
  ~Coordinator() override { Shutdown(); }

  grpc::Status Join(grpc::ServerContext*, Stream* stream) override {
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

  int joins() const { return joins_; }

 private:
  std::atomic<int> joins_ = 0;
  std::atomic<bool> replaces_ = false;
};

ControlHandler Deaf() {
  return {.on_message = [](const v1::JoinResponse&) {},
          .on_disconnected = [](const std::string&) {},
          .make_heartbeat = [] { return v1::Heartbeat(); },
          .on_leave = [](const std::string&) {}};
}

// Sends several messages as one, and records what the worker answers.
class PackingCoordinator final : public ListeningCoordinator {
 public:
  explicit PackingCoordinator(int messages) : messages_(messages) {}
  ~PackingCoordinator() override { Shutdown(); }

  grpc::Status Join(grpc::ServerContext*, Stream* stream) override {
    v1::JoinRequest registration;
    stream->Read(&registration);
    v1::JoinResponse packed;
    packed.mutable_registered()->mutable_heartbeat_interval()->set_seconds(3600);
    for (int i = 0; i < messages_; ++i) {
      packed.add_more()->mutable_run()->set_operation_id(absl::StrCat(i));
    }
    stream->Write(packed);
    v1::JoinRequest request;
    while (stream->Read(&request)) {
      if (request.has_heartbeat()) continue;
      absl::MutexLock lock(&mutex_);
      ++packs_;
      wire::TakeApart(request, [&](const v1::JoinRequest& each, bool) {
        answers_.push_back(each.finished().operation_id());
      });
    }
    return grpc::Status::OK;
  }

  // Waits for as many answers as messages.
  std::vector<std::string> Answers() {
    const auto all = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return static_cast<int>(answers_.size()) >= messages_;
    };
    absl::MutexLock lock(&mutex_);
    mutex_.AwaitWithTimeout(absl::Condition(&all), absl::Seconds(20));
    return answers_;
  }
  int packs() {
    absl::MutexLock lock(&mutex_);
    return packs_;
  }

 private:
  const int messages_;
  absl::Mutex mutex_;
  std::vector<std::string> answers_ ABSL_GUARDED_BY(mutex_);
  int packs_ ABSL_GUARDED_BY(mutex_) = 0;
};

// Runs a client that answers each message as an inline operation does, after `duration`.
void AnswerAll(PackingCoordinator* coordinator, absl::Duration duration) {
  ControlClientOptions options;
  options.coordinator = coordinator->address();
  options.registration.set_name("worker");
  ControlClient client(options);
  ControlHandler handler = Deaf();
  handler.on_message = [&](const v1::JoinResponse& message) {
    absl::SleepFor(duration);
    v1::JoinRequest answer;
    answer.mutable_finished()->set_operation_id(message.run().operation_id());
    answer.mutable_finished()->mutable_reserved();
    client.Send(answer);
  };
  client.Start(handler);
  const std::vector<std::string> answers = coordinator->Answers();
  client.Stop();
  EXPECT_EQ(answers.size(), 20);
  for (size_t i = 0; i < answers.size(); ++i) EXPECT_EQ(answers[i], absl::StrCat(i));
}

TEST(ControlClientTest, AnswersToMessagesThatCameTogetherLeaveTogether) {
  PackingCoordinator coordinator(20);
  AnswerAll(&coordinator, absl::ZeroDuration());
  EXPECT_LE(coordinator.packs(), 10);  // usually one
}

TEST(ControlClientTest, AnswersDoNotWaitForLongOperations) {
  PackingCoordinator coordinator(20);
  AnswerAll(&coordinator, absl::Milliseconds(5));
  EXPECT_EQ(coordinator.packs(), 20);
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
