// Tests of slow clients that occupy shared resources: a whole server, workers that compute nothing,
// and short limits.
#include <algorithm>
#include <memory>
#include <string>
#include <thread>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "server/edge/testing/test_support.h"

namespace ringattn::server {
namespace {

using grpc::StatusCode;

constexpr int kQ = 1, kK = 2, kV = 3;

v1::ForwardRequest Header(uint64_t tokens) {
  v1::ForwardRequest request;
  v1::AttentionShape* shape = request.mutable_header()->mutable_shape();
  shape->set_batch(1);
  shape->set_seq_len_q(tokens);
  shape->set_seq_len_kv(tokens);
  shape->set_num_heads(1);
  shape->set_head_dim(8);
  request.mutable_header()->set_dtype(v1::DATA_TYPE_FLOAT32);
  return request;
}

v1::ForwardRequest Chunk(int tensor, uint64_t offset, uint64_t bytes) {
  v1::ForwardRequest request;
  request.mutable_chunk()->set_tensor(static_cast<v1::TensorId>(tensor));
  request.mutable_chunk()->set_offset(offset);
  request.mutable_chunk()->set_data(Pattern(tensor, offset, bytes));
  return request;
}

struct Call {
  Call(TestCluster* cluster, uint64_t tokens) {
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    stream = cluster->attention->Forward(&context);
    stream->Write(Header(tokens));
  }

  bool ReadAccepted() {
    v1::ForwardResponse response;
    return stream->Read(&response) && response.has_accepted();
  }

  grpc::Status End() {
    v1::ForwardResponse response;
    while (stream->Read(&response)) {
    }
    return stream->Finish();
  }

  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReaderWriter<v1::ForwardRequest, v1::ForwardResponse>> stream;
};

grpc::Status RunSmall(TestCluster* cluster) {
  Call call(cluster, 4);
  for (int tensor : {kQ, kK, kV}) call.stream->Write(Chunk(tensor, 0, 4 * 8 * 4));
  call.stream->WritesDone();
  return call.End();
}

// Sends a byte every 5 ms until the call ends; returns its status.
grpc::Status Trickle(Call* call) {
  uint64_t at = 0;
  while (call->stream->Write(Chunk(kQ, at++, 1))) absl::SleepFor(absl::Milliseconds(5));
  return call->End();
}

void ExpectTooSlow(const grpc::Status& status) {
  EXPECT_EQ(status.error_code(), StatusCode::DEADLINE_EXCEEDED) << status.error_message();
  EXPECT_NE(status.error_details().find("UPLOAD_TOO_SLOW"), std::string::npos);
}

// 200 bytes per second arrive, so no idle limit applies.
TEST(SlowClientsTest, ATrickleIsEndedAndItsMemoryFreed) {
  TestCluster cluster(1, [](ServerOptions* options) {
    options->core.limits.min_upload_bytes_per_second = 1 << 20;
    options->core.limits.upload_grace = absl::Milliseconds(500);
    options->core.limits.upload_idle_timeout = absl::Hours(1);
  });
  Call call(&cluster, 100'000);
  ASSERT_TRUE(call.ReadAccepted());
  ExpectTooSlow(Trickle(&call));
  EXPECT_TRUE(cluster.WaitIdle());
  EXPECT_TRUE(RunSmall(&cluster).ok());
}

TEST(SlowClientsTest, TricklesInEverySlotEndWhileOthersWait) {
  TestCluster cluster(1, [](ServerOptions* options) {
    options->core.max_operations_per_worker = 1;
    options->core.limits.min_upload_bytes_per_second = 1 << 20;
    options->core.limits.upload_grace = absl::Hours(1);  // must not be the cause
    options->core.limits.upload_grace_contended = absl::Milliseconds(500);
    options->core.limits.upload_idle_timeout = absl::Hours(1);
  });
  Call call(&cluster, 100'000);
  ASSERT_TRUE(call.ReadAccepted());
  grpc::Status slow;
  std::thread trickle([&] { slow = Trickle(&call); });
  EXPECT_TRUE(RunSmall(&cluster).ok());
  trickle.join();
  ExpectTooSlow(slow);
}

TEST(SlowClientsTest, AClientThatWaitsForMembersIsNotSlow) {
  TestCluster cluster(1, [](ServerOptions* options) {
    options->core.limits.min_upload_bytes_per_second = 1 << 20;
    options->core.limits.upload_grace = absl::Seconds(1);
  });
  cluster.workers[0]->SetUploadGate(false);
  // Large enough to fill the server's window, then waits for as long as a trickle may last.
  Call waits(&cluster, 200'000);
  ASSERT_TRUE(waits.ReadAccepted());
  std::thread uploader([&] {
    const uint64_t bytes = 200'000 * 8 * 4;
    for (int tensor : {kQ, kK, kV}) {
      for (uint64_t at = 0; at < bytes; at += 1 << 20) {
        waits.stream->Write(Chunk(tensor, at, std::min<uint64_t>(1 << 20, bytes - at)));
      }
    }
    waits.stream->WritesDone();
  });
  Call slow(&cluster, 100'000);
  ASSERT_TRUE(slow.ReadAccepted());
  ExpectTooSlow(Trickle(&slow));
  cluster.workers[0]->SetUploadGate(true);
  uploader.join();
  const grpc::Status status = waits.End();
  EXPECT_TRUE(status.ok()) << status.error_message();
}

}  // namespace
}  // namespace ringattn::server
