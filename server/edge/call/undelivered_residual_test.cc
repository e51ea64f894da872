// Tests of residuals whose handle may not have reached the client.
#include <chrono>
#include <memory>
#include <string>

#include <grpcpp/create_channel.h>

#include "absl/time/clock.h"
#include "common/security/credentials.h"
#include "gtest/gtest.h"
#include "server/edge/testing/test_support.h"

namespace ringattn::server {
namespace {

constexpr uint64_t kTokens = 16, kDim = 8;

// A Forward with a residual, whose inputs are all sent. Its summary exceeds the window of the
// client's stream, so its write stays pending until the client reads.
struct RetainingCall {
  RetainingCall(const TestCluster& cluster, const std::string& id) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 64 << 10);
    stub = v1::AttentionService::NewStub(grpc::CreateCustomChannel(
        cluster.server->addresses().listen, TransportSecurity().ChannelCredentials(), arguments));
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    stream = stub->Forward(&context);
    v1::ForwardRequest request;
    v1::ForwardHeader* header = request.mutable_header();
    header->set_request_id(id);
    v1::AttentionShape* shape = header->mutable_shape();
    shape->set_batch(1);
    shape->set_seq_len_q(kTokens);
    shape->set_seq_len_kv(kTokens);
    shape->set_num_heads(1);
    shape->set_head_dim(kDim);
    header->set_dtype(v1::DATA_TYPE_FLOAT32);
    header->mutable_retain();
    header->mutable_reply()->set_with_timeline(true);
    stream->Write(request);
    for (const v1::TensorId tensor : {v1::TENSOR_ID_Q, v1::TENSOR_ID_K, v1::TENSOR_ID_V}) {
      v1::TensorChunk* chunk = request.mutable_chunk();
      chunk->set_tensor(tensor);
      chunk->set_data(Pattern(tensor, 0, kTokens * kDim * 4));
      stream->Write(request);
    }
    stream->WritesDone();
  }

  std::unique_ptr<v1::AttentionService::Stub> stub;
  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReaderWriter<v1::ForwardRequest, v1::ForwardResponse>> stream;
};

bool HasSucceeded(const TestCluster& cluster, const std::string& id) {
  return WaitUntil([&] {
    grpc::ClientContext context;
    v1::GetStatusRequest request;
    v1::GetStatusResponse response;
    request.set_request_id(id);
    return cluster.attention->GetStatus(&context, request, &response).ok() &&
           response.state() == v1::REQUEST_STATE_SUCCEEDED;
  });
}

TEST(UndeliveredResidualTest, AResidualWithoutADeliveredSummaryIsDropped) {
  TestCluster cluster(1);
  RetainingCall call(cluster, "untold");
  ASSERT_TRUE(HasSucceeded(cluster, "untold"));
  EXPECT_EQ(cluster.workers[0]->dropped_residuals(), 0);
  call.context.TryCancel();
  EXPECT_TRUE(WaitUntil([&] { return cluster.workers[0]->dropped_residuals() == 1; }));
  EXPECT_TRUE(cluster.WaitIdle());
}

TEST(UndeliveredResidualTest, AResidualWithADeliveredSummaryStays) {
  TestCluster cluster(1);
  RetainingCall call(cluster, "told");
  std::string handle;
  v1::ForwardResponse response;
  while (call.stream->Read(&response)) {
    if (response.has_summary()) handle = response.summary().residual_handle();
  }
  EXPECT_TRUE(call.stream->Finish().ok());
  ASSERT_FALSE(handle.empty());
  EXPECT_TRUE(cluster.WaitIdle());
  absl::SleepFor(absl::Milliseconds(300));
  EXPECT_EQ(cluster.workers[0]->dropped_residuals(), 0);
  grpc::ClientContext context;
  v1::RenewResidualsRequest renew;
  v1::RenewResidualsResponse renewed;
  renew.add_residual_handles(handle);
  ASSERT_TRUE(cluster.attention->RenewResiduals(&context, renew, &renewed).ok());
  EXPECT_EQ(renewed.residuals(0).reason(), "");
}

}  // namespace
}  // namespace ringattn::server
