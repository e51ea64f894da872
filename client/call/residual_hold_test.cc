#include "client/call/residual_hold.h"

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <grpcpp/create_channel.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/security/credentials.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "ringattn/v1/attention.grpc.pb.h"

namespace ringattn::client {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

using Stream = grpc::ServerReaderWriter<v1::HoldResidualsResponse, v1::HoldResidualsRequest>;

// Records what each stream holds.
class FakeServer final : public v1::AttentionService::Service {
 public:
  FakeServer() {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", TransportSecurity().ServerCredentials(), &port);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    channel_ = TransportSecurity().Dial(absl::StrCat("127.0.0.1:", port), {});
  }
  ~FakeServer() override { server_->Shutdown(absl::ToChronoTime(absl::Now())); }

  grpc::Status HoldResiduals(grpc::ServerContext*, Stream* stream) override {
    {
      absl::MutexLock lock(&mutex_);
      ++streams_;
      if (!refusal_.ok()) return refusal_;
    }
    v1::HoldResidualsRequest request;
    while (stream->Read(&request)) {
      v1::HoldResidualsResponse response;
      {
        absl::MutexLock lock(&mutex_);
        ++requests_;
        largest_ = std::max(largest_, request.residual_handles_size());
        for (const std::string& handle : request.residual_handles()) {
          const bool gone = gone_.count(handle) > 0;
          response.add_residuals()->set_reason(gone ? "RESIDUAL_LOST" : "");
          if (!gone) held_.insert(handle);
        }
        for (const std::string& handle : request.released_handles()) held_.erase(handle);
        if (break_) {
          break_ = false;
          held_.clear();
          return grpc::Status(grpc::StatusCode::UNAVAILABLE, "broken");
        }
      }
      stream->Write(response);
    }
    absl::MutexLock lock(&mutex_);
    held_.clear();
    ++ended_;
    return grpc::Status::OK;
  }

  std::set<std::string> held() const {
    absl::MutexLock lock(&mutex_);
    return held_;
  }
  // Waits for the condition and fails the test on a timeout.
  void Await(const std::function<bool()>& condition) const {
    const absl::Time end = absl::Now() + absl::Seconds(20);
    while (!condition()) {
      ASSERT_LT(absl::Now(), end);
      absl::SleepFor(absl::Milliseconds(2));
    }
  }
  template <typename T>
  T Get(T FakeServer::*member) const {
    absl::MutexLock lock(&mutex_);
    return this->*member;
  }
  template <typename T>
  void Set(T FakeServer::*member, T value) {
    absl::MutexLock lock(&mutex_);
    this->*member = std::move(value);
  }

  mutable absl::Mutex mutex_;
  std::set<std::string> held_, gone_;
  int streams_ = 0, requests_ = 0, largest_ = 0, ended_ = 0;
  bool break_ = false;
  grpc::Status refusal_;
  std::unique_ptr<grpc::Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
};

constexpr LeaseHold::Options kQuick = {absl::Milliseconds(20), absl::Milliseconds(5),
                                       absl::Milliseconds(20)};

TEST(ResidualHold, SendsNothingBeforeTheFirstHold) {
  FakeServer server;
  {
    ResidualHold hold(server.channel_, nullptr, kQuick);
    hold.Hold({});
    hold.Release({"never"});
    absl::SleepFor(absl::Milliseconds(100));
  }
  EXPECT_EQ(server.Get(&FakeServer::streams_), 0);
}

TEST(ResidualHold, HoldsReleasesAndEnds) {
  FakeServer server;
  {
    ResidualHold hold(server.channel_, nullptr, kQuick);
    hold.Hold({"a", "b"});
    hold.Hold({"c"});
    server.Await([&] { return hold.confirmed() == 3; });
    EXPECT_THAT(server.held(), ElementsAre("a", "b", "c"));
    hold.Release({"b"});
    EXPECT_EQ(hold.confirmed(), 2u);
    server.Await([&] { return server.held().size() == 2; });
    EXPECT_THAT(server.held(), ElementsAre("a", "c"));
    EXPECT_TRUE(hold.trouble().ok());
    // Signs of life are sent without a call.
    const int before = server.Get(&FakeServer::requests_);
    server.Await([&] { return server.Get(&FakeServer::requests_) > before + 3; });
    EXPECT_EQ(server.Get(&FakeServer::streams_), 1);
  }
  server.Await([&] { return server.Get(&FakeServer::ended_) == 1; });
  EXPECT_THAT(server.held(), IsEmpty());
}

TEST(ResidualHold, ABrokenStreamIsReopenedWithAllHolds) {
  FakeServer server;
  ResidualHold hold(server.channel_, nullptr, kQuick);
  hold.Hold({"a", "b", "lost"});
  server.Await([&] { return hold.confirmed() == 3; });
  hold.Release({"b"});
  server.Set(&FakeServer::gone_, std::set<std::string>{"lost"});
  server.Set(&FakeServer::break_, true);  // the next sign of life detects it
  server.Await([&] { return server.Get(&FakeServer::streams_) == 2 && hold.confirmed() == 1; });
  EXPECT_THAT(server.held(), ElementsAre("a"));
  server.Await([&] { return hold.trouble().ok(); });
}

TEST(ResidualHold, TroubleIsReportedAndRetried) {
  FakeServer server;
  server.Set(&FakeServer::refusal_, grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "too many"));
  ResidualHold hold(server.channel_, nullptr, kQuick);
  hold.Hold({"a"});
  server.Await([&] { return server.Get(&FakeServer::streams_) > 2; });
  EXPECT_EQ(hold.trouble().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(hold.confirmed(), 0u);
  server.Set(&FakeServer::refusal_, grpc::Status::OK);
  server.Await([&] { return hold.confirmed() == 1; });
  EXPECT_TRUE(hold.trouble().ok());
}

TEST(ResidualHold, AServerWithoutHoldsIsNotRetried) {
  FakeServer server;
  server.Set(&FakeServer::refusal_, grpc::Status(grpc::StatusCode::UNIMPLEMENTED, "unknown"));
  ResidualHold hold(server.channel_, nullptr, kQuick);
  hold.Hold({"a"});
  server.Await([&] { return absl::IsUnimplemented(hold.trouble()); });
  absl::SleepFor(absl::Milliseconds(100));
  hold.Hold({"b"});
  EXPECT_EQ(server.Get(&FakeServer::streams_), 1);
}

TEST(ResidualHold, ManyHandlesAreSentInBoundedRequests) {
  FakeServer server;
  ResidualHold hold(server.channel_, nullptr, kQuick);
  std::vector<std::string> handles;
  for (int i = 0; i < 3000; ++i) handles.push_back(absl::StrCat("r", i));
  hold.Hold(handles);
  server.Await([&] { return hold.confirmed() == 3000; });
  EXPECT_THAT(server.held(), SizeIs(3000));
  EXPECT_EQ(server.Get(&FakeServer::largest_), 1024);
  hold.Release(handles);
  server.Await([&] { return server.held().empty(); });
}

TEST(ResidualHold, EndsAtOnceWithAServerThatDoesNotAnswer) {
  // Nobody listens there, so the stream waits for its connection.
  ResidualHold hold(TransportSecurity().Dial("127.0.0.1:1", {}), nullptr, kQuick);
  hold.Hold({"a"});
  absl::SleepFor(absl::Milliseconds(50));
  EXPECT_EQ(hold.confirmed(), 0u);
}

}  // namespace
}  // namespace ringattn::client
