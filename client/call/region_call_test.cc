// Calls that require their regions, with workers that join later.
#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "absl/synchronization/notification.h"
#include "client/api/client.h"
#include "client/api/region.h"
#include "client/testing/fake_attention_server.h"
#include "client/testing/fake_region_worker.h"
#include "client/testing/small_forward.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "ringattn/v1/local_memory.grpc.pb.h"

namespace ringattn::client {
namespace {

using ::testing::HasSubstr;

// A coordinator whose second worker joins when the test says so.
class FakeLocalMemory final : public v1::LocalMemoryService::Service {
 public:
  grpc::Status Attach(grpc::ServerContext*, const v1::AttachRequest* request,
                      v1::AttachResponse* response) override {
    if (before_answer) before_answer();
    response->set_region_id(request->region_id().empty() ? "region" : request->region_id());
    for (FakeRegionWorker* worker : {&first, &second}) {
      if (worker == &second && !joined) continue;
      if (worker->has_region()) {
        response->add_attached(worker->name());
      } else {
        *response->add_points() = worker->Point();
      }
    }
    return grpc::Status::OK;
  }

  FakeRegionWorker first{"first"}, second{"second"};
  std::atomic<bool> joined{false};
  std::function<void()> before_answer;
};

grpc::Status Lacks() {
  return FakeError{.code = grpc::StatusCode::FAILED_PRECONDITION,
                   .message = "second has not attached the region of q",
                   .reason = "TRANSPORT_UNAVAILABLE"}
      .ToStatus();
}

grpc::Status ServeFromRegions(const v1::ForwardHeader& header, ForwardStream* stream) {
  v1::ForwardResponse accepted = AcceptedFor(header);
  accepted.mutable_accepted()->set_transport(v1::TRANSPORT_HOST_MEMORY);
  stream->Write(accepted);
  v1::ForwardRequest more;
  while (stream->Read(&more)) {
  }
  v1::ForwardResponse last;
  last.mutable_summary()->set_flops(1);
  stream->Write(last);
  return grpc::Status::OK;
}

class RegionCallTest : public testing::Test {
 protected:
  void Serve(FakeAttentionServer::Handler handler) {
    server_ = std::make_unique<FakeAttentionServer>(std::move(handler), &memory_);
    ClientOptions options;
    options.retry.initial_backoff = absl::Milliseconds(5);
    options.retry.max_backoff = absl::Milliseconds(20);
    options.retry.max_replays = 4;
    client_ = *Client::Connect(server_->address(), options);
    region_ = *Region::Allocate(client_.get(), 1 << 16);
    ASSERT_TRUE(memory_.first.has_region());
    small_.PlaceIn(region_->memory().data());
  }

  PendingCall Start(absl::Duration deadline = absl::Seconds(60)) {
    return client_->StartForward(small_.args, small_.results,
                                 {.transport = TransportPreference::kHostMemory,
                                  .transport_required = true,
                                  .deadline = deadline});
  }

  void ExpectSingleReply(bool required) {
    Serve([required](int, const auto& header, auto*, auto* stream) {
      EXPECT_TRUE(header.reply().single_message());
      v1::ForwardResponse response;
      *response.mutable_single()->mutable_accepted() = AcceptedFor(header).accepted();
      response.mutable_single()->mutable_accepted()->set_transport(v1::TRANSPORT_HOST_MEMORY);
      response.mutable_single()->mutable_summary()->set_flops(7);
      if (required) {
        v1::ForwardRequest more;
        EXPECT_FALSE(stream->Read(&more));
      }
      stream->Write(response);
      return grpc::Status::OK;
    });
    const CallResult report = client_
                                  ->StartForward(small_.args, small_.results,
                                                 {.transport = TransportPreference::kHostMemory,
                                                  .transport_required = required})
                                  .Wait();
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->accepted.transport(), v1::TRANSPORT_HOST_MEMORY);
    EXPECT_EQ(report->summary.flops(), 7);
  }

  FakeLocalMemory memory_;
  std::unique_ptr<FakeAttentionServer> server_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Region> region_;
  SmallForward small_;
};

TEST_F(RegionCallTest, ANewWorkerAttachesTheRegionBeforeTheReplay) {
  Serve([this](int call, const auto& header, auto*, auto* stream) {
    memory_.joined = true;
    if (call == 0) {
      EXPECT_EQ(header.transport().places_size(), 5);
      return Lacks();
    }
    EXPECT_TRUE(memory_.second.has_region());
    return ServeFromRegions(header, stream);
  });
  const CallResult report = Start().Wait();
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->accepted.transport(), v1::TRANSPORT_HOST_MEMORY);
  EXPECT_EQ(report->summary.attempts(), 2u);
}

// With a required region nothing follows the header.
TEST_F(RegionCallTest, TheReplyMayBeASingleMessage) { ExpectSingleReply(/*required=*/true); }

// Otherwise the coordinator might choose the relay, so the call remains open until the reply.
TEST_F(RegionCallTest, TheReplyToAnOpenCallMayBeASingleMessage) {
  ExpectSingleReply(/*required=*/false);
}

// No worker had the region, so the header names none; the rejection is the same.
TEST_F(RegionCallTest, TheOnlyWorkerMayHaveRestarted) {
  Serve([this](int call, const auto& header, auto*, auto* stream) {
    memory_.joined = true;
    if (call > 0) return ServeFromRegions(header, stream);
    memory_.first.DropRegions();
    return Lacks();
  });
  const CallResult report = Start().Wait();
  ASSERT_TRUE(report.ok()) << report.status();
}

TEST_F(RegionCallTest, ANewCoordinatorLearnsTheRegionBeforeTheReplay) {
  Serve([this](int call, const auto& header, auto*, auto* stream) {
    if (call > 0) return ServeFromRegions(header, stream);
    memory_.first.DropRegions();
    return FakeError{.code = grpc::StatusCode::INVALID_ARGUMENT,
                     .message = "names no region of this client",
                     .reason = "REGION_UNKNOWN"}
        .ToStatus();
  });
  const CallResult report = Start().Wait();
  ASSERT_TRUE(report.ok()) << report.status();
}

TEST_F(RegionCallTest, TheRejectionIsFinalIfNoWorkerAttachesTheRegion) {
  memory_.second.RefuseWith(AttachCode::kForeignUser);
  Serve([this](auto...) {
    memory_.joined = true;
    return Lacks();
  });
  const CallResult report = Start().Wait();
  EXPECT_TRUE(absl::IsFailedPrecondition(report.status()));
  EXPECT_THAT(report.status().message(), HasSubstr("second has not attached"));
  EXPECT_EQ(server_->calls(), 1);
  EXPECT_GE(memory_.second.attaches(), 1);
}

TEST_F(RegionCallTest, ReplaysForLackOfARegionAreBounded) {
  Serve([this](auto...) {
    memory_.joined = true;
    memory_.second.DropRegions();  // restarts again and again
    return Lacks();
  });
  const CallResult report = Start().Wait();
  EXPECT_TRUE(absl::IsFailedPrecondition(report.status()));
  EXPECT_THAT(report.status().message(), HasSubstr("(after 4 replays)"));
  EXPECT_EQ(server_->calls(), 5);
}

TEST_F(RegionCallTest, TheDeadlineAndTheCallerEndTheWait) {
  Serve([](auto...) { return Lacks(); });
  absl::Notification over;
  memory_.before_answer = [&] { over.WaitForNotification(); };
  const absl::Time begin = absl::Now();
  const CallResult late = Start(absl::Milliseconds(300)).Wait();
  EXPECT_TRUE(absl::IsFailedPrecondition(late.status())) << late.status();
  const PendingCall cancelled = Start();
  while (server_->calls() < 2) absl::SleepFor(absl::Milliseconds(5));
  absl::SleepFor(absl::Milliseconds(50));
  cancelled.Cancel();
  EXPECT_TRUE(absl::IsCancelled(cancelled.Wait().status()));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(20));
  EXPECT_EQ(server_->calls(), 2);
  over.Notify();
}

}  // namespace
}  // namespace ringattn::client
