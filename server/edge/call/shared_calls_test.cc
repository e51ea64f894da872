// Tests of Calls streams: a whole server, and workers that compute nothing.
#include "server/edge/call/shared_calls.h"

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "google/rpc/error_details.pb.h"
#include "gtest/gtest.h"
#include "server/edge/testing/test_support.h"

namespace ringattn::server {
namespace {

using grpc::StatusCode;
using testing::HasSubstr;

constexpr uint64_t kBytes = 16 * 8 * 4;  // of each tensor but LSE

v1::ForwardRequest SmallForward() {
  v1::ForwardRequest request;
  v1::ForwardHeader* header = request.mutable_header();
  header->mutable_shape()->set_batch(1);
  header->mutable_shape()->set_seq_len_q(16);
  header->mutable_shape()->set_seq_len_kv(16);
  header->mutable_shape()->set_num_heads(1);
  header->mutable_shape()->set_head_dim(8);
  header->set_dtype(v1::DATA_TYPE_FLOAT32);
  for (const v1::TensorId tensor : {v1::TENSOR_ID_Q, v1::TENSOR_ID_K, v1::TENSOR_ID_V}) {
    v1::InlineTensor* added = header->add_inline_tensors();
    added->set_tensor(tensor);
    added->set_data(Pattern(tensor, 0, kBytes));
  }
  return request;
}

v1::CallRequest ForwardCall(uint64_t number) {
  v1::CallRequest request;
  request.set_call(number);
  *request.mutable_forward() = SmallForward();
  return request;
}

v1::CallRequest Cancellation(uint64_t number) {
  v1::CallRequest request;
  request.set_call(number);
  request.set_cancel(true);
  return request;
}

// What arrived for one call.
struct Answer {
  std::string out;
  bool accepted = false, summary = false;
  google::rpc::Status end;
};

struct Stream {
  explicit Stream(TestCluster* cluster) {
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    stream = cluster->attention->Calls(&context);
  }

  // One message.
  bool Write(const std::vector<v1::CallRequest>& requests) {
    v1::CallsRequest message;
    for (const v1::CallRequest& request : requests) *message.add_requests() = request;
    return stream->Write(message);
  }
  bool Write(const v1::CallRequest& request) { return Write(std::vector{request}); }

  // Reads until `count` calls have ended, or the stream has.
  void ReadEnds(size_t count) {
    while (ended.size() < count && Read()) {
    }
  }

  grpc::Status Finish() {
    while (Read()) {
    }
    return stream->Finish();
  }

  bool Read() {
    v1::CallsResponse message;
    if (!stream->Read(&message)) return false;
    for (const v1::CallResponse& response : message.responses()) Take(response);
    return true;
  }

  void Take(const v1::CallResponse& response) {
    Answer& answer = open[response.call()];
    answer.accepted |= response.forward().has_accepted();
    answer.summary |= response.forward().has_summary();
    const v1::TensorChunk& chunk = response.forward().chunk();
    if (chunk.tensor() == v1::TENSOR_ID_OUT) answer.out += chunk.data();
    if (!response.has_end()) return;
    answer.end = response.end();
    ended[response.call()] = std::move(answer);
    open.erase(response.call());
  }

  StatusCode CodeOf(uint64_t call) const {
    const auto found = ended.find(call);
    return found == ended.end() ? StatusCode::DO_NOT_USE
                                : static_cast<StatusCode>(found->second.end.code());
  }

  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReaderWriter<v1::CallsRequest, v1::CallsResponse>> stream;
  std::map<uint64_t, Answer> open, ended;
};

void ExpectOutputs(const Answer& answer) {
  EXPECT_EQ(answer.end.code(), 0) << answer.end.message();
  EXPECT_TRUE(answer.accepted);
  EXPECT_TRUE(answer.summary);
  EXPECT_EQ(answer.out, Pattern(v1::TENSOR_ID_OUT, 0, kBytes));
}

TEST(SharedCalls, ServesManyCallsOnOneStream) {
  TestCluster cluster(2);
  Stream client(&cluster);
  for (uint64_t call = 1; call <= 50; ++call) ASSERT_TRUE(client.Write(ForwardCall(call)));
  client.stream->WritesDone();  // calls in progress go on
  const grpc::Status status = client.Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(client.ended.size(), 50);
  EXPECT_TRUE(client.open.empty());
  for (const auto& [call, answer] : client.ended) ExpectOutputs(answer);
  EXPECT_TRUE(cluster.WaitIdle());
  for (const auto& worker : cluster.workers) EXPECT_EQ(worker->wrong_bytes(), 0);
}

TEST(SharedCalls, ANumberMayBeUsedAgain) {
  TestCluster cluster(1);
  Stream client(&cluster);
  for (int round = 0; round < 20; ++round) {
    client.ended.clear();
    ASSERT_TRUE(client.Write(ForwardCall(7)));
    client.ReadEnds(1);
    ASSERT_EQ(client.CodeOf(7), StatusCode::OK) << round;
    ExpectOutputs(client.ended.at(7));
  }
}

TEST(SharedCalls, AnErrorHasItsDetailsAndEndsItsCallOnly) {
  TestCluster cluster(1);
  Stream client(&cluster);
  v1::CallRequest wrong = ForwardCall(1);
  wrong.mutable_forward()->mutable_header()->mutable_shape()->set_head_dim(1000);
  ASSERT_TRUE(client.Write(wrong));
  ASSERT_TRUE(client.Write(ForwardCall(2)));
  v1::CallRequest chunk;
  chunk.set_call(3);
  chunk.mutable_forward()->mutable_chunk()->set_data("no header");
  ASSERT_TRUE(client.Write(chunk));
  v1::CallRequest incomplete = ForwardCall(4);
  incomplete.mutable_forward()->mutable_header()->mutable_inline_tensors()->RemoveLast();
  ASSERT_TRUE(client.Write(incomplete));
  client.ReadEnds(4);
  ExpectOutputs(client.ended.at(2));
  EXPECT_EQ(client.CodeOf(1), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(client.CodeOf(3), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(client.CodeOf(4), StatusCode::INVALID_ARGUMENT);
  std::vector<std::string> fields;
  for (const google::protobuf::Any& detail : client.ended.at(1).end.details()) {
    google::rpc::BadRequest bad;
    if (!detail.UnpackTo(&bad)) continue;
    for (const auto& violation : bad.field_violations()) fields.push_back(violation.field());
  }
  EXPECT_THAT(fields, testing::Contains("shape.head_dim"));
}

TEST(SharedCalls, ACallIsCancelled) {
  TestCluster cluster(1);
  cluster.workers[0]->SetRunGate(false);
  Stream client(&cluster);
  ASSERT_TRUE(client.Write(ForwardCall(1)));
  ASSERT_TRUE(WaitUntil([&] { return cluster.workers[0]->held_operations() == 1; }));
  ASSERT_TRUE(client.Write(Cancellation(2)));  // no such call
  ASSERT_TRUE(client.Write(Cancellation(1)));
  client.ReadEnds(1);
  EXPECT_EQ(client.CodeOf(1), StatusCode::CANCELLED);
  cluster.workers[0]->SetRunGate(true);
  EXPECT_TRUE(cluster.WaitIdle());
  ASSERT_TRUE(client.Write(ForwardCall(1)));
  client.ended.clear();
  client.ReadEnds(1);
  ExpectOutputs(client.ended.at(1));
}

TEST(SharedCalls, ACallHasItsOwnDeadline) {
  TestCluster cluster(1);
  cluster.workers[0]->SetRunGate(false);
  Stream client(&cluster);
  v1::CallRequest urgent = ForwardCall(1);
  urgent.mutable_timeout()->set_nanos(300'000'000);
  ASSERT_TRUE(client.Write(urgent));
  ASSERT_TRUE(client.Write(ForwardCall(2)));
  client.ReadEnds(1);
  EXPECT_EQ(client.CodeOf(1), StatusCode::DEADLINE_EXCEEDED);
  cluster.workers[0]->SetRunGate(true);
  client.ReadEnds(2);
  EXPECT_EQ(client.CodeOf(2), StatusCode::OK);
}

TEST(SharedCalls, IsNotReadWhileItHasManyCalls) {
  TestCluster cluster(
      1, [](ServerOptions* options) { options->core.limits.max_calls_per_stream = 2; });
  cluster.workers[0]->SetRunGate(false);
  Stream client(&cluster);
  for (uint64_t call = 1; call <= 3; ++call) ASSERT_TRUE(client.Write(ForwardCall(call)));
  ASSERT_TRUE(WaitUntil([&] { return cluster.workers[0]->reserves() == 2; }));
  absl::SleepFor(absl::Milliseconds(200));
  EXPECT_EQ(cluster.workers[0]->reserves(), 2);
  cluster.workers[0]->SetRunGate(true);
  client.ReadEnds(3);
  for (uint64_t call = 1; call <= 3; ++call) EXPECT_EQ(client.CodeOf(call), StatusCode::OK);
}

TEST(SharedCalls, OneMessageBeginsNoMoreCallsThanTheStreamHasRoomFor) {
  TestCluster cluster(
      1, [](ServerOptions* options) { options->core.limits.max_calls_per_stream = 2; });
  cluster.workers[0]->SetRunGate(false);
  Stream client(&cluster);
  std::vector<v1::CallRequest> requests;
  for (uint64_t call = 1; call <= 20; ++call) requests.push_back(ForwardCall(call));
  requests.push_back(Cancellation(20));  // read with the last one
  ASSERT_TRUE(client.Write(requests));
  ASSERT_TRUE(WaitUntil([&] { return cluster.workers[0]->reserves() == 2; }));
  absl::SleepFor(absl::Milliseconds(200));
  EXPECT_EQ(cluster.workers[0]->reserves(), 2);
  cluster.workers[0]->SetRunGate(true);
  client.stream->WritesDone();
  EXPECT_TRUE(client.Finish().ok());
  ASSERT_EQ(client.ended.size(), 20);
  for (uint64_t call = 1; call < 20; ++call) ExpectOutputs(client.ended.at(call));
}

TEST(SharedCalls, OneMessageMayHoldManyCalls) {
  TestCluster cluster(2);
  Stream client(&cluster);
  std::vector<v1::CallRequest> requests;
  for (uint64_t call = 1; call <= 60; ++call) requests.push_back(ForwardCall(call));
  requests[30].mutable_forward()->mutable_header()->mutable_shape()->set_head_dim(1000);
  ASSERT_TRUE(client.Write(requests));
  client.ReadEnds(60);
  EXPECT_EQ(client.CodeOf(31), StatusCode::INVALID_ARGUMENT);
  client.ended.erase(31);
  for (const auto& [call, answer] : client.ended) ExpectOutputs(answer);
  // A broken protocol in the middle of a message begins none of the calls that follow.
  cluster.workers[0]->SetRunGate(false);
  cluster.workers[1]->SetRunGate(false);
  client.ended.clear();
  ASSERT_TRUE(client.Write({ForwardCall(1), ForwardCall(1), ForwardCall(2)}));
  EXPECT_EQ(client.Finish().error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(client.CodeOf(1), StatusCode::CANCELLED);
  EXPECT_EQ(client.ended.count(2), 0);
  for (const auto& worker : cluster.workers) worker->SetRunGate(true);
  EXPECT_TRUE(cluster.WaitIdle());
}

TEST(SharedCalls, ABrokenProtocolEndsTheStreamAndItsCalls) {
  for (const bool repeats : {true, false}) {
    TestCluster cluster(1);
    cluster.workers[0]->SetRunGate(false);
    Stream client(&cluster);
    ASSERT_TRUE(client.Write(ForwardCall(1)));
    ASSERT_TRUE(client.Write(repeats ? ForwardCall(1) : v1::CallRequest()));
    const grpc::Status status = client.Finish();
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(),
                HasSubstr(repeats ? "is 1, a call in progress" : "neither forward nor backward"));
    EXPECT_EQ(client.CodeOf(1), StatusCode::CANCELLED);
    cluster.workers[0]->SetRunGate(true);
    EXPECT_TRUE(cluster.WaitIdle());
  }
}

TEST(SharedCalls, TheCallsOfALostClientEnd) {
  TestCluster cluster(1);
  cluster.workers[0]->SetRunGate(false);
  {
    Stream client(&cluster);
    for (uint64_t call = 1; call <= 5; ++call) {
      ASSERT_TRUE(client.Write(ForwardCall(call)));
    }
    ASSERT_TRUE(WaitUntil([&] { return cluster.workers[0]->held_operations() > 0; }));
    client.context.TryCancel();
    EXPECT_EQ(client.Finish().error_code(), StatusCode::CANCELLED);
  }
  cluster.workers[0]->SetRunGate(true);
  EXPECT_TRUE(cluster.WaitIdle());
}

TEST(SharedCalls, ServesCallsAgainAfterLostClients) {
  TestCluster cluster(1);
  for (int round = 0; round < 30; ++round) {
    Stream client(&cluster);
    for (uint64_t call = 1; call <= 8; ++call) {
      ASSERT_TRUE(client.Write(ForwardCall(call)));
    }
    client.ReadEnds(round % 8);
    client.context.TryCancel();
    client.Finish();
  }
  EXPECT_TRUE(cluster.WaitIdle());
  Stream client(&cluster);
  ASSERT_TRUE(client.Write(ForwardCall(1)));
  client.ReadEnds(1);
  EXPECT_EQ(client.CodeOf(1), StatusCode::OK);
}

TEST(SharedCalls, AClientHasABoundedNumberOfStreams) {
  TestCluster cluster(
      1, [](ServerOptions* options) { options->core.limits.max_streams_per_client = 2; });
  std::vector<std::unique_ptr<Stream>> streams;
  for (int i = 0; i < 2; ++i) {
    streams.push_back(std::make_unique<Stream>(&cluster));
    ASSERT_TRUE(streams.back()->Write(ForwardCall(1)));
    streams.back()->ReadEnds(1);
    EXPECT_EQ(streams.back()->CodeOf(1), StatusCode::OK);
  }
  Stream third(&cluster);
  const grpc::Status status = third.Finish();
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_details(), HasSubstr("TOO_MANY_STREAMS"));
  streams[0]->stream->WritesDone();
  EXPECT_TRUE(streams[0]->Finish().ok());
  // The server forgets a stream soon after the client has its status.
  EXPECT_TRUE(WaitUntil([&] {
    Stream fourth(&cluster);
    fourth.Write(ForwardCall(1));
    fourth.ReadEnds(1);
    return fourth.CodeOf(1) == StatusCode::OK;
  }));
}

TEST(SharedCalls, AnIdleStreamDoesNotDelayTheServersEnd) {
  TestCluster cluster(1);
  Stream client(&cluster);
  ASSERT_TRUE(client.Write(ForwardCall(1)));
  client.ReadEnds(1);
  const absl::Time begin = absl::Now();
  EXPECT_TRUE(cluster.server->Shutdown(absl::Seconds(20)));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(15));
  EXPECT_EQ(client.Finish().error_code(), StatusCode::UNAVAILABLE);
}

}  // namespace
}  // namespace ringattn::server
