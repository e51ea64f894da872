// Calls over host memory that accept other transports too share a stream once host memory serves
// them.
#include <atomic>
#include <memory>
#include <string>

#include <grpcpp/server_builder.h>

#include "client/api/client.h"
#include "client/api/region.h"
#include "client/testing/fake_attention_server.h"
#include "client/testing/fake_region_worker.h"
#include "client/testing/small_forward.h"
#include "common/security/credentials.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "ringattn/v1/local_memory.grpc.pb.h"

namespace ringattn::client {
namespace {

using testing::ElementsAre;

// A worker of this machine.
class LocalMemory final : public v1::LocalMemoryService::Service {
 public:
  grpc::Status Attach(grpc::ServerContext*, const v1::AttachRequest* request,
                      v1::AttachResponse* response) override {
    response->set_region_id(request->region_id().empty() ? "region" : request->region_id());
    if (worker.has_region()) {
      response->add_attached(worker.name());
    } else {
      *response->add_points() = worker.Point();
    }
    return grpc::Status::OK;
  }

  FakeRegionWorker worker{"first"};
};

// Answers without computing, over the first transport that a call accepts.
class Server final : public v1::AttentionService::Service {
 public:
  Server() {
    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", TransportSecurity().ServerCredentials(), &port);
    builder.RegisterService(this);
    builder.RegisterService(&memory);
    server_ = builder.BuildAndStart();
    address = "127.0.0.1:" + std::to_string(port);
  }
  ~Server() override { server_->Shutdown(std::chrono::system_clock::now()); }

  grpc::Status Forward(
      grpc::ServerContext*,
      grpc::ServerReaderWriter<v1::ForwardResponse, v1::ForwardRequest>* stream) override {
    v1::ForwardRequest request;
    if (!stream->Read(&request)) return grpc::Status::CANCELLED;
    ++separate;
    EXPECT_FALSE(request.header().transport().required());
    EXPECT_GE(request.header().transport().accept_size(), 1);
    stream->Write(Reply(request.header()));
    return grpc::Status::OK;
  }

  grpc::Status Calls(
      grpc::ServerContext*,
      grpc::ServerReaderWriter<v1::CallsResponse, v1::CallsRequest>* stream) override {
    v1::CallsRequest message;
    while (stream->Read(&message)) {
      v1::CallsResponse answer;
      for (const v1::CallRequest& request : message.requests()) {
        ++shared;
        const v1::ForwardHeader& header = request.forward().header();
        EXPECT_TRUE(header.transport().required());
        EXPECT_THAT(header.transport().accept(), ElementsAre(v1::TRANSPORT_HOST_MEMORY));
        v1::CallResponse& response = *answer.add_responses();
        response.set_call(request.call());
        if (refusal.empty()) {
          *response.mutable_forward() = Reply(header);
          response.mutable_end();
        } else {
          const grpc::Status error = FakeError{.code = grpc::StatusCode::FAILED_PRECONDITION,
                                               .message = "the test refuses it",
                                               .reason = refusal}
                                         .ToStatus();
          response.mutable_end()->ParseFromString(error.error_details());
        }
      }
      stream->Write(answer);
    }
    return grpc::Status::OK;
  }

  v1::ForwardResponse Reply(const v1::ForwardHeader& header) const {
    v1::ForwardResponse response;
    v1::Accepted& accepted = *response.mutable_single()->mutable_accepted();
    accepted = AcceptedFor(header).accepted();
    accepted.set_transport(v1::TRANSPORT_HOST_MEMORY);
    accepted.set_max_calls_per_stream(64);
    response.mutable_single()->mutable_summary()->set_flops(1);
    return response;
  }

  LocalMemory memory;
  std::string address, refusal;
  std::atomic<int> separate{0}, shared{0};

 private:
  std::unique_ptr<grpc::Server> server_;
};

class HostAlone : public testing::Test {
 protected:
  HostAlone() : client_(*Client::Connect(server_.address, {})) {
    region_ = *Region::Allocate(client_.get(), 1 << 16);
    small_.PlaceIn(region_->memory().data());
  }

  CallResult Call() { return client_->StartForward(small_.args, small_.results, {}).Wait(); }

  Server server_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Region> region_;
  SmallForward small_;
};

TEST_F(HostAlone, CallsShareAStreamOnceHostMemoryServedOne) {
  for (int i = 0; i < 5; ++i) {
    const CallResult result = Call();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->accepted.transport(), v1::TRANSPORT_HOST_MEMORY);
  }
  EXPECT_EQ(server_.separate, 1);
  EXPECT_EQ(server_.shared, 4);
}

class RefusedHostAlone : public HostAlone, public testing::WithParamInterface<const char*> {};

TEST_P(RefusedHostAlone, TheCallAcceptsTheOtherTransportsAgain) {
  server_.refusal = GetParam();
  for (int i = 0; i < 4; ++i) {
    const CallResult result = Call();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->summary.attempts(), 1);
    EXPECT_TRUE(result->last_failure.ok());
  }
  EXPECT_EQ(server_.shared, 1);  // the others do not try within HostHistory::kPause
  EXPECT_EQ(server_.separate, 4);
}

INSTANTIATE_TEST_SUITE_P(, RefusedHostAlone,
                         testing::Values("TRANSPORT_UNAVAILABLE", "REGION_UNKNOWN"));

TEST_F(HostAlone, OtherErrorsAreTheCalls) {
  ASSERT_TRUE(Call().ok());
  server_.refusal = "QUOTA";
  EXPECT_TRUE(absl::IsFailedPrecondition(Call().status()));
  EXPECT_EQ(server_.separate, 1);
}

}  // namespace
}  // namespace ringattn::client
