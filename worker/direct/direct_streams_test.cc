// Runs whole workers with a fake coordinator and clients that stream to them.
#include "worker/direct/direct_streams.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/security/credentials.h"
#include "common/wire/open_metadata.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/testing/cluster.h"

namespace ringattn::worker {
namespace {

using Message = v1::JoinRequest;
using testing::HasSubstr;

WorkerOptions WithPort() {
  WorkerOptions options;
  options.client_data_listen = "127.0.0.1:0";
  return options;
}

class DirectStreamsTest : public testing::Test {
 protected:
  std::unique_ptr<TestExchange> Open(int rank, const std::string& token, uint32_t part,
                                     uint32_t parts, absl::Status* status) {
    auto exchange = std::make_unique<TestExchange>(cluster_.worker(rank).client_data_address());
    *status = exchange->OpenPart(token, part, parts);
    return exchange;
  }
  absl::Status Refused(int rank, const std::string& token, uint32_t part = 0, uint32_t parts = 1) {
    absl::Status status;
    Open(rank, token, part, parts, &status);
    return status;
  }
  // Returns the first report that satisfies `is`.
  v1::TransferProgress AwaitProgress(int rank,
                                     const std::function<bool(const v1::TransferProgress&)>& is) {
    while (true) {
      const auto message =
          cluster_.coordinator().Await(Cluster::Name(rank), Message::kTransferProgress);
      if (!message.has_value()) {
        ADD_FAILURE() << "no such progress";
        return {};
      }
      if (is(message->transfer_progress())) return message->transfer_progress();
    }
  }

  Cluster cluster_{2, WithPort()};
  const TestRequest request_ = TestRequest::Make(61, 2);
};

TEST_F(DirectStreamsTest, WorkersRegisterClientAddress) {
  const auto registration = cluster_.coordinator().WaitForWorker("worker-0", absl::Seconds(5));
  ASSERT_TRUE(registration.has_value());
  EXPECT_EQ(registration->client_data_address(), cluster_.worker(0).client_data_address());
  EXPECT_NE(registration->client_data_address(), registration->data_address());
}

TEST_F(DirectStreamsTest, SeveralStreamsServeOneOperation) {
  cluster_.Form(1);
  for (const uint32_t parts : {1u, 2u, 5u}) {
    const std::string id = absl::StrCat("1-", parts);
    cluster_.Reserve(request_, id, 1, "token");
    std::vector<std::vector<std::unique_ptr<TestExchange>>> exchanges(2);
    for (int rank = 0; rank < 2; ++rank) {
      for (uint32_t part = 0; part < parts; ++part) {
        absl::Status status;
        exchanges[rank].push_back(Open(rank, absl::StrCat("token", rank), part, parts, &status));
        ASSERT_TRUE(status.ok()) << status;
      }
      // Sends everything on the last stream: any stream may carry inputs.
      EXPECT_TRUE(exchanges[rank].back()->Upload(request_, rank, 777));
      EXPECT_TRUE(
          cluster_.coordinator().Await(Cluster::Name(rank), Message::kUploaded).has_value());
    }
    cluster_.SendRun(id, 1);
    // A worker reports Finished after it has made the outputs available, so Finished may arrive
    // after Delivered.
    TensorMap outputs;
    for (int rank = 0; rank < 2; ++rank) {
      for (auto& exchange : exchanges[rank]) {
        const absl::Status status = exchange->Download(request_, rank, &outputs);
        EXPECT_TRUE(status.ok()) << status;
      }
      const auto delivered = cluster_.coordinator().Await(Cluster::Name(rank), Message::kDelivered);
      ASSERT_TRUE(delivered.has_value());
      EXPECT_EQ(delivered->delivered().operation_id(), id);
    }
    EXPECT_TRUE(outputs == request_.expected);
    cluster_.Release(id, 1);
  }
}

TEST_F(DirectStreamsTest, TokenOpensOneSetOfStreamsUntilRelease) {
  cluster_.Form(1);
  cluster_.Reserve(request_, "1-1", 1, "token");
  const absl::Status refusal = DirectTransfer::Refusal();
  EXPECT_EQ(Refused(0, "token1"), refusal);  // belongs to another rank
  EXPECT_EQ(Refused(0, "token"), refusal);
  EXPECT_EQ(Refused(0, ""), refusal);
  EXPECT_EQ(Refused(0, kTestSecret), refusal);
  EXPECT_TRUE(absl::IsInvalidArgument(Refused(0, "token0", 2, 2)));
  EXPECT_TRUE(absl::IsInvalidArgument(Refused(0, "token0", 0, 17)));
  absl::Status status;
  const auto first = Open(0, "token0", 1, 2, &status);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(Refused(0, "token0", 1, 2), refusal);  // already used
  EXPECT_EQ(Refused(0, "token0", 0, 3), refusal);  // another number of parts
  const auto second = Open(0, "token0", 0, 2, &status);
  EXPECT_TRUE(status.ok()) << status;
  cluster_.Release("1-1", 1);
  EXPECT_TRUE(absl::IsAborted(first->Finish()));
  EXPECT_TRUE(absl::IsAborted(second->Finish()));
  EXPECT_EQ(Refused(1, "token1"), refusal);  // expired, although never used
  EXPECT_THAT(cluster_.worker(0).metrics().Text(),
              HasSubstr("ringattn_refused_streams_total{reason=\"parts\"} 2"));
}

// A valid token does not help a call that cannot be parsed.
TEST_F(DirectStreamsTest, UnreadableMetadataIsRejectedWithoutSpendingToken) {
  cluster_.Form(1);
  cluster_.Reserve(request_, "1-1", 1, "token");
  const auto refused = [&](const TestExchange::Metadata& metadata) {
    return TestExchange(cluster_.worker(0).client_data_address()).OpenWith(metadata);
  };
  v1::OpenShard open;
  open.set_token("token0");
  const std::string right = open.SerializeAsString();
  open.set_operation_id(std::string(1024, 'x'));
  const std::string large = open.SerializeAsString();
  const char* const key = wire::kOpenShardMetadataKey;
  const absl::Status refusal = DirectTransfer::Refusal();
  EXPECT_EQ(refused({}), refusal);
  EXPECT_EQ(refused({{"ringattn-token", "token0"}}), refusal);
  EXPECT_EQ(refused({{key, ""}}), refusal);
  EXPECT_EQ(refused({{key, "\xff"}}), refusal);
  EXPECT_EQ(refused({{key, right.substr(0, right.size() - 1)}}), refusal);
  EXPECT_EQ(refused({{key, right}, {key, right}}), refusal);
  EXPECT_EQ(refused({{key, large}}), refusal);
  EXPECT_THAT(cluster_.worker(0).metrics().Text(),
              HasSubstr("ringattn_refused_streams_total{reason=\"token\"} 7"));
  TestExchange exchange(cluster_.worker(0).client_data_address());
  EXPECT_TRUE(exchange.OpenWith({{key, right}}).ok());
  cluster_.Release("1-1", 1);
  EXPECT_TRUE(absl::IsAborted(exchange.Finish()));
}

// The operation may end while a stream is being opened for it.
TEST_F(DirectStreamsTest, OperationMayEndWhileStreamsOpen) {
  cluster_.Form(1);
  for (int round = 0; round < 40; ++round) {
    const std::string id = absl::StrCat("1-", round), token = absl::StrCat("token-", round, "-");
    cluster_.Reserve(request_, id, 1, token);
    std::vector<std::thread> clients;
    for (uint32_t part = 0; part < 4; ++part) {
      clients.emplace_back([&, part] {
        TestExchange exchange(cluster_.worker(0).client_data_address());
        absl::Status status = exchange.OpenPart(absl::StrCat(token, 0), part, 4);
        if (status.ok()) status = exchange.Finish();
        EXPECT_TRUE(absl::IsAborted(status) || absl::IsUnauthenticated(status)) << status;
      });
    }
    absl::SleepFor(absl::Microseconds(200 * round));
    cluster_.Release(id, 1);  // the reply arrives once all references are gone
    for (std::thread& client : clients) client.join();
  }
}

// A window of 5 bytes: neither the reply nor the status ever leaves the worker.
TEST_F(DirectStreamsTest, PeerThatReadsNothingHoldsNoMemory) {
  cluster_.Form(1);
  cluster_.Reserve(request_, "1-1", 1, "token");
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 5);
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  const auto stub = v1::ShardService::NewStub(
      grpc::CreateCustomChannel(cluster_.worker(0).client_data_address(),
                                TransportSecurity().ChannelCredentials(), arguments));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
  v1::OpenShard open;
  open.set_token("token0");
  wire::PutOpenShard(open, &context);
  const auto stream = stub->Exchange(&context);
  absl::SleepFor(absl::Milliseconds(300));
  EXPECT_EQ(Refused(0, "token0"), DirectTransfer::Refusal());  // the stream is open
  const absl::Time begin = absl::Now();
  cluster_.Release("1-1", 1);  // the reply arrives
  EXPECT_LT(absl::Now() - begin, absl::Seconds(5));
  v1::ExchangeResponse unread;
  EXPECT_FALSE(stream->Read(&unread));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(DirectStreamsTest, InvalidChunkSizeIsRejectedWithoutSpendingToken) {
  cluster_.Form(1);
  cluster_.Reserve(request_, "1-1", 1, "token");
  for (const uint32_t bytes : {1u, 1023u, (16u << 20) + 1}) {
    TestExchange exchange(cluster_.worker(0).client_data_address());
    const absl::Status status = exchange.OpenPart("token0", 0, 1, bytes);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(status.message(), HasSubstr("max_chunk_bytes"));
  }
  TestExchange exchange(cluster_.worker(0).client_data_address());
  EXPECT_TRUE(exchange.OpenPart("token0", 0, 1, 1024).ok());
  cluster_.Release("1-1", 1);
  EXPECT_TRUE(absl::IsAborted(exchange.Finish()));
}

TEST_F(DirectStreamsTest, NextGenerationInvalidatesTokens) {
  cluster_.Form(1);
  cluster_.Reserve(request_, "1-1", 1, "token");
  cluster_.TearDown(1);
  cluster_.Form(2);
  EXPECT_EQ(Refused(0, "token0"), DirectTransfer::Refusal());
}

TEST_F(DirectStreamsTest, ReportsWhetherItWaitsForClient) {
  cluster_.Form(1);
  cluster_.Reserve(request_, "1-1", 1, "token");
  // Waits for the client, although it has not connected yet.
  EXPECT_EQ(AwaitProgress(0, [](const auto& p) { return p.waits_for_client(); }).received(), 0u);
  std::vector<std::unique_ptr<TestExchange>> exchanges;
  uint64_t bytes = 0;
  for (int rank = 0; rank < 2; ++rank) {
    absl::Status status;
    exchanges.push_back(Open(rank, absl::StrCat("token", rank), 0, 1, &status));
    exchanges.back()->Upload(request_, rank, 1000);
  }
  for (const auto& [id, tensor] : request_.inputs) bytes += request_.MapOf(id).local_bytes(0);
  // With all inputs here, the worker waits for the coordinator, not for the client.
  const auto uploaded = AwaitProgress(0, [&](const auto& p) { return p.received() == bytes; });
  EXPECT_FALSE(uploaded.waits_for_client());
  cluster_.SendRun("1-1", 1);
  TensorMap outputs;
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_TRUE(exchanges[rank]->Download(request_, rank, &outputs).ok());
  }
  const auto last = AwaitProgress(0, [](const auto& p) { return p.sent() > 0; });
  EXPECT_FALSE(last.waits_for_client());
  cluster_.Release("1-1", 1);
}

TEST_F(DirectStreamsTest, ReportsInvalidChunkToCoordinator) {
  cluster_.Form(1);
  cluster_.Reserve(request_, "1-1", 1, "token");
  absl::Status status;
  const auto wrong = Open(0, "token0", 0, 1, &status);
  wrong->SendChunk(TensorId::kQ, 0, std::string(8, 0));
  wrong->SendChunk(TensorId::kQ, 4, std::string(8, 0));
  EXPECT_TRUE(absl::IsInvalidArgument(wrong->Finish()));
  EXPECT_THAT(AwaitProgress(0, [](const auto& p) { return !p.bad_chunk().empty(); }).bad_chunk(),
              HasSubstr("overlap bytes that were sent before"));
  const auto broken = Open(1, "token1", 0, 1, &status);
  broken->Cancel();
  EXPECT_THAT(AwaitProgress(1, [](const auto& p) { return !p.failure().empty(); }).failure(),
              HasSubstr("closed a stream"));
  cluster_.Release("1-1", 1);
}

}  // namespace
}  // namespace ringattn::worker
