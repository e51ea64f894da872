// Calls in several streams, against a fake server.
#include <cstring>
#include <mutex>
#include <set>
#include <thread>

#include "absl/strings/match.h"
#include "absl/synchronization/blocking_counter.h"
#include "client/api/client.h"
#include "client/testing/fake_attention_server.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr uint64_t kHeads = 4, kRowBytes = kHeads * 64 * 2;

// The lse that the fake server makes up for a row of q.
float LseOf(const char* q_row, uint64_t head) {
  float sum = static_cast<float>(1000 * head);
  for (int i = 0; i < 16; ++i) sum += static_cast<float>(static_cast<uint8_t>(q_row[i])) * (i + 1);
  return sum;
}

// out = q, and lse by LseOf.
grpc::Status Answer(const v1::ForwardHeader& header, ForwardStream* stream) {
  stream->Write(AcceptedFor(header));
  const std::map<int, std::string> tensors = ReadUpload(header, stream);
  const std::string& q = tensors.at(v1::TENSOR_ID_Q);
  SendChunk(stream, v1::TENSOR_ID_OUT, 0, q);
  std::string lse;
  const uint64_t rows = header.shape().seq_len_q();
  for (uint64_t batch = 0; batch < header.shape().batch(); ++batch) {
    for (uint64_t head = 0; head < kHeads; ++head) {
      for (uint64_t row = 0; row < rows; ++row) {
        const float value = LseOf(q.data() + (batch * rows + row) * kRowBytes, head);
        lse.append(reinterpret_cast<const char*>(&value), sizeof(value));
      }
    }
  }
  SendChunk(stream, v1::TENSOR_ID_LSE, 0, lse);
  v1::ForwardResponse last;
  last.mutable_summary()->set_flops(1);
  last.mutable_summary()->set_bytes_up(q.size() + tensors.at(v1::TENSOR_ID_K).size() +
                                       tensors.at(v1::TENSOR_ID_V).size());
  stream->Write(last);
  return grpc::Status::OK;
}

grpc::Status Stall(const v1::ForwardHeader& header, grpc::ServerContext* context,
                   ForwardStream* stream) {
  stream->Write(AcceptedFor(header));
  while (!context->IsCancelled()) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  return grpc::Status::CANCELLED;
}

struct Problem {
  explicit Problem(uint64_t batch, uint64_t seq_len = 1500) {
    args.shape.set_batch(batch);
    args.shape.set_seq_len_q(seq_len);
    args.shape.set_seq_len_kv(seq_len);
    args.shape.set_num_heads(kHeads);
    args.shape.set_num_kv_heads(2);
    args.shape.set_head_dim(64);
    args.dtype = v1::DATA_TYPE_BFLOAT16;
    args.options.set_causal(true);
    for (auto* bytes : {&q, &k, &v}) {
      const bool is_q = bytes == &q;
      bytes->resize(*TensorBytes(args.shape, args.dtype, is_q ? v1::TENSOR_ID_Q : v1::TENSOR_ID_K));
      for (size_t i = 0; i < bytes->size(); ++i) {
        (*bytes)[i] = static_cast<uint8_t>(i * 7 + i / 251);
      }
    }
    out.resize(q.size());
    lse.resize(batch * kHeads * seq_len * sizeof(float), 0xff);
    args.q = BytesOf(q);
    args.k = BytesOf(k);
    args.v = BytesOf(v);
    results = {.out = MutableBytesOf(out), .lse = MutableBytesOf(lse)};
  }

  void ExpectAnswer() const {
    EXPECT_EQ(out, q);
    const uint64_t rows = args.shape.seq_len_q();
    const auto* values = reinterpret_cast<const float*>(lse.data());
    for (uint64_t batch = 0; batch < args.shape.batch(); ++batch) {
      for (uint64_t head = 0; head < kHeads; ++head) {
        for (uint64_t row = 0; row < rows; ++row) {
          const auto* q_row =
              reinterpret_cast<const char*>(q.data()) + (batch * rows + row) * kRowBytes;
          ASSERT_EQ(values[(batch * kHeads + head) * rows + row], LseOf(q_row, head));
        }
      }
    }
  }

  ForwardArgs args;
  ForwardResults results;
  std::vector<uint8_t> q, k, v, out, lse;
};

std::unique_ptr<Client> ConnectTo(const FakeAttentionServer& server) {
  ClientOptions options;
  options.channels = 3;
  options.retry.initial_backoff = absl::Milliseconds(5);
  options.retry.max_backoff = absl::Milliseconds(20);
  return *Client::Connect(server.address(), options);
}

TEST(SplitCall, BlocksOfQueriesComeTogether) {
  std::mutex mutex;
  std::set<std::string> ids, peers;
  FakeAttentionServer server(
      [&](int, const auto& header, grpc::ServerContext* context, auto* stream) {
        {
          const std::lock_guard lock(mutex);
          ids.insert(header.request_id());
          peers.insert(context->peer());
        }
        return Answer(header, stream);
      });
  Problem problem(1);
  int done = 0;
  const auto client = ConnectTo(server);
  const Operation operation =
      client->StartForward(problem.args, problem.results, {.request_id = "call", .streams = 3},
                           [&](const CallResult& result) { done += result.ok(); });
  const CallResult report = operation.Wait();
  ASSERT_TRUE(report.ok()) << report.status();
  problem.ExpectAnswer();
  EXPECT_EQ(done, 1);
  EXPECT_EQ(operation.request_id(), "call");
  EXPECT_THAT(ids, ElementsAre("call/0", "call/1", "call/2"));
  EXPECT_EQ(peers.size(), 3u);  // a connection each
  EXPECT_EQ(report->streams(), 3u);
  ASSERT_EQ(report->parts.size(), 3u);
  EXPECT_EQ(report->accepted.request_id(), "call");
  EXPECT_EQ(report->parts[2].accepted.request_id(), "call/2");
  EXPECT_EQ(report->summary.attempts(), 1u);
  EXPECT_EQ(report->summary.flops(), 3);
  // Keys that blocks share were sent more than once, and the report says so.
  EXPECT_GT(report->summary.bytes_up(), problem.q.size() + problem.k.size() + problem.v.size());
  EXPECT_EQ(report->summary.bytes_up(), report->parts[0].summary.bytes_up() +
                                            report->parts[1].summary.bytes_up() +
                                            report->parts[2].summary.bytes_up());
}

TEST(SplitCall, BatchRowsComeTogether) {
  FakeAttentionServer server(
      [](int, const auto& header, auto*, auto* stream) { return Answer(header, stream); });
  Problem problem(4, 300);
  const CallResult report =
      ConnectTo(server)->Forward(problem.args, problem.results, {.streams = 3});
  ASSERT_TRUE(report.ok()) << report.status();
  problem.ExpectAnswer();
  EXPECT_EQ(report->streams(), 3u);
  EXPECT_EQ(report->summary.bytes_up(), problem.q.size() + problem.k.size() + problem.v.size());
}

TEST(SplitCall, MoreStreamsThanChannelsOrRows) {
  FakeAttentionServer server(
      [](int, const auto& header, auto*, auto* stream) { return Answer(header, stream); });
  const auto client = ConnectTo(server);
  Problem problem(1, 5);  // travels inline
  CallResult report = client->Forward(problem.args, problem.results, {.streams = 64});
  ASSERT_TRUE(report.ok()) << report.status();
  problem.ExpectAnswer();
  EXPECT_EQ(report->streams(), 5u);
  // What is one request in the end is no split call.
  Problem row(1, 1);
  report = client->Forward(row.args, row.results, {.request_id = "one", .streams = 2});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->streams(), 1u);
  EXPECT_EQ(report->accepted.request_id(), "one");
}

// As workers do whose memory is enough for one.
TEST(SplitCall, RequestsMayBeServedOneByOne) {
  std::mutex one_at_a_time;
  FakeAttentionServer server([&](int, const auto& header, auto*, auto* stream) {
    const std::lock_guard lock(one_at_a_time);
    return Answer(header, stream);
  });
  Problem problem(1);
  const CallResult report =
      ConnectTo(server)->Forward(problem.args, problem.results, {.streams = 6});
  ASSERT_TRUE(report.ok()) << report.status();
  problem.ExpectAnswer();
}

TEST(SplitCall, OneFailureEndsAllAndIsTheStatus) {
  std::atomic<int> stalled{0};
  FakeAttentionServer server([&](int, const auto& header, auto* context, auto* stream) {
    if (!absl::EndsWith(header.request_id(), "/1")) {
      ++stalled;
      return Stall(header, context, stream);
    }
    // The others are on their way, so that they have to be ended.
    while (stalled < 2) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    return FakeError{.code = grpc::StatusCode::RESOURCE_EXHAUSTED,
                     .message = "too much",
                     .reason = "TOO_LARGE",
                     .violations = {{"shape", "is too large"}}}
        .ToStatus();
  });
  Problem problem(1);
  int done = 0;
  const CallResult result = ConnectTo(server)
                                ->StartForward(problem.args, problem.results, {.streams = 3},
                                               [&](const CallResult&) { ++done; })
                                .Wait();
  EXPECT_EQ(result.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("stream 2 of 3: too much"));
  EXPECT_EQ(DetailsOf(result.status()).reason, "TOO_LARGE");
  EXPECT_EQ(done, 1);
}

TEST(SplitCall, ALostRequestIsReplayedAlone) {
  std::atomic<bool> lost{false};
  FakeAttentionServer server([&](int, const auto& header, auto*, auto* stream) {
    if (absl::EndsWith(header.request_id(), "/2") && !lost.exchange(true)) {
      return FakeError{.code = grpc::StatusCode::ABORTED, .reason = "WORKER_LOST"}.ToStatus();
    }
    return Answer(header, stream);
  });
  Problem problem(1);
  const CallResult report =
      ConnectTo(server)->Forward(problem.args, problem.results, {.streams = 3});
  ASSERT_TRUE(report.ok()) << report.status();
  problem.ExpectAnswer();
  EXPECT_EQ(server.calls(), 4);
  EXPECT_EQ(report->summary.attempts(), 2u);
  EXPECT_EQ(report->parts[0].summary.attempts(), 1u);
  EXPECT_EQ(report->parts[2].summary.attempts(), 2u);
}

TEST(SplitCall, CancelEndsAll) {
  absl::BlockingCounter streaming(3);
  std::atomic<int> cancelled{0};
  FakeAttentionServer server([&](int, const auto& header, auto* context, auto* stream) {
    streaming.DecrementCount();
    const grpc::Status status = Stall(header, context, stream);
    ++cancelled;
    return status;
  });
  Problem problem(1);
  int done = 0;
  const auto client = ConnectTo(server);
  const Operation operation = client->StartForward(problem.args, problem.results, {.streams = 3},
                                                   [&](const CallResult&) { ++done; });
  streaming.Wait();
  operation.Cancel();
  EXPECT_EQ(operation.Wait().status().code(), absl::StatusCode::kCancelled);
  operation.Cancel();
  EXPECT_EQ(done, 1);
  while (cancelled < 3) std::this_thread::sleep_for(std::chrono::milliseconds(2));
}

TEST(SplitCall, TheDeadlineIsForAll) {
  FakeAttentionServer server([](int, const auto& header, auto* context, auto* stream) {
    // One ends in time, which does not help the others.
    if (absl::EndsWith(header.request_id(), "/0")) return Answer(header, stream);
    return Stall(header, context, stream);
  });
  Problem problem(1);
  const absl::Time start = absl::Now();
  const CallResult result = ConnectTo(server)->Forward(
      problem.args, problem.results, {.streams = 3, .deadline = absl::Milliseconds(300)});
  EXPECT_EQ(result.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_LT(absl::Now() - start, absl::Seconds(20));
}

TEST(SplitCall, ProgressIsOfTheWholeCall) {
  FakeAttentionServer server(
      [](int, const auto& header, auto*, auto* stream) { return Answer(header, stream); });
  std::map<int, double> last;
  bool within = true;
  CallOptions options{.streams = 3};
  options.on_progress = [&](const v1::Progress& p) {
    last[p.state()] = p.fraction_done();
    within &= p.fraction_done() >= 0 && p.fraction_done() <= 1;
  };
  Problem problem(1, 40'000);
  ASSERT_TRUE(ConnectTo(server)->Forward(problem.args, problem.results, options).ok());
  EXPECT_TRUE(within);
  EXPECT_EQ(last[v1::REQUEST_STATE_DOWNLOADING], 1.0);
}

TEST(SplitCall, DestructionEndsWhatIsInFlight) {
  FakeAttentionServer server([](int, const auto& header, auto* context, auto* stream) {
    return Stall(header, context, stream);
  });
  Problem problem(1);
  for (int round = 0; round < 20; ++round) {
    auto client = ConnectTo(server);
    const int before = server.calls();
    std::atomic<int> done{0};
    const Operation operation = client->StartForward(problem.args, problem.results, {.streams = 3},
                                                     [&](const CallResult&) { ++done; });
    // None of them have arrived, or some.
    while (server.calls() < before + round % 4) std::this_thread::yield();
    client.reset();
    EXPECT_EQ(done, 1);
    EXPECT_EQ(operation.Wait().status().code(), absl::StatusCode::kCancelled);
  }
}

// Whoever waits may drop the client at once, and whoever drops the operation loses nothing.
TEST(SplitCall, ShortLivedClients) {
  FakeAttentionServer server(
      [](int, const auto& header, auto*, auto* stream) { return Answer(header, stream); });
  for (int round = 0; round < 50; ++round) {
    Problem problem(1, 400);
    const CallResult report =
        ConnectTo(server)->Forward(problem.args, problem.results, {.streams = 4});
    ASSERT_TRUE(report.ok()) << report.status();
    problem.ExpectAnswer();
  }
}

TEST(SplitCall, WhatCannotBeSplitNeverLeaves) {
  FakeAttentionServer server(
      [](int, const auto& header, auto*, auto* stream) { return Answer(header, stream); });
  const auto client = ConnectTo(server);
  Problem problem(1);
  int done = 0;
  const auto status = [&](int streams) {
    return client
        ->StartForward(problem.args, problem.results, {.streams = streams},
                       [&](const CallResult&) { ++done; })
        .Wait()
        .status();
  };
  for (const int streams : {0, -1, 65}) {
    EXPECT_EQ(status(streams).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(DetailsOf(status(streams)).violations[0].field, "streams");
  }
  problem.args.k.remove_suffix(2);
  EXPECT_THAT(std::string(status(3).message()), HasSubstr("k has"));
  EXPECT_EQ(done, 7);

  BackwardArgs backward{.shape = problem.args.shape, .dtype = problem.args.dtype};
  backward.shape.set_num_kv_heads(1);
  EXPECT_EQ(DetailsOf(client->Backward(backward, {}, {.streams = 2}).status()).violations[0].field,
            "streams");
  EXPECT_EQ(server.calls(), 0);
}

}  // namespace
}  // namespace ringattn::client
