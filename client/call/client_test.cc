#include "client/api/client.h"

#include <cstring>
#include <set>
#include <thread>

#include <grpc/grpc.h>

#include "absl/synchronization/notification.h"
#include "client/testing/fake_attention_server.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::client {
namespace {

using ::testing::HasSubstr;

// q, k and v with distinct bytes, and memory for the results.
struct Problem {
  explicit Problem(uint64_t seq_len = 1000) {
    args.shape.set_batch(2);
    args.shape.set_seq_len_q(seq_len);
    args.shape.set_seq_len_kv(seq_len / 2);
    args.shape.set_num_heads(4);
    args.shape.set_num_kv_heads(2);
    args.shape.set_head_dim(64);
    args.dtype = v1::DATA_TYPE_BFLOAT16;
    q = Filled(v1::TENSOR_ID_Q, 1);
    k = Filled(v1::TENSOR_ID_K, 2);
    v = Filled(v1::TENSOR_ID_V, 3);
    out.resize(*TensorBytes(args.shape, args.dtype, v1::TENSOR_ID_OUT));
    lse.resize(*TensorBytes(args.shape, args.dtype, v1::TENSOR_ID_LSE), 0xff);
    args.q = BytesOf(q);
    args.k = BytesOf(k);
    args.v = BytesOf(v);
    results = {.out = MutableBytesOf(out), .lse = MutableBytesOf(lse)};
  }

  std::vector<uint8_t> Filled(v1::TensorId tensor, int salt) const {
    std::vector<uint8_t> bytes(*TensorBytes(args.shape, args.dtype, tensor));
    for (size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = static_cast<uint8_t>(i * 7 + i / 251 + salt);
    }
    return bytes;
  }

  ForwardArgs args;
  ForwardResults results;
  std::vector<uint8_t> q, k, v, out, lse;
};

ClientOptions FastRetries() {
  ClientOptions options;
  options.retry.initial_backoff = absl::Milliseconds(5);
  options.retry.max_backoff = absl::Milliseconds(20);
  options.retry.max_replays = 4;
  return options;
}

std::unique_ptr<Client> ConnectTo(const FakeAttentionServer& server,
                                  const ClientOptions& options = FastRetries()) {
  return *Client::Connect(server.address(), options);
}

TEST(Client, TensorsArriveCompleteInBothDirections) {
  std::map<int, std::string> uploaded;
  std::string request_id;
  FakeAttentionServer server([&](int, const auto& header, auto*, auto* stream) {
    request_id = header.request_id();
    EXPECT_EQ(header.reply().max_chunk_bytes(), ClientOptions().max_chunk_bytes_down);
    EXPECT_TRUE(header.reply().with_crc32c());
    return Echo(header, stream);
  });
  Problem problem;
  const auto client = ConnectTo(server);
  const PendingCall operation = client->StartForward(problem.args, problem.results);
  const CallResult report = operation.Wait();
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(operation.request_id(), request_id);
  EXPECT_FALSE(request_id.empty());
  EXPECT_EQ(problem.out, problem.q);
  EXPECT_EQ(problem.lse, std::vector<uint8_t>(problem.lse.size(), 0));
  EXPECT_EQ(report->summary.attempts(), 1u);
  EXPECT_TRUE(report->last_failure.ok());
  EXPECT_EQ(report->failed_seconds, 0);
  EXPECT_EQ(report->accepted.request_id(), request_id);
  EXPECT_GE(report->times.finished_seconds, report->times.accepted_seconds);
}

TEST(Client, TheTraceparentTravelsWithEveryAttempt) {
  constexpr char kTraceparent[] = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
  std::vector<std::string> seen;
  FakeAttentionServer server(
      [&](int call, const auto& header, grpc::ServerContext* context, auto* stream) {
        for (const auto& [key, value] : context->client_metadata()) {
          if (key == "traceparent") seen.emplace_back(value.data(), value.size());
        }
        if (call == 0) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "once more");
        return Echo(header, stream);
      });
  const auto client = ConnectTo(server);
  Problem problem;
  ASSERT_TRUE(client->Forward(problem.args, problem.results, {.traceparent = kTraceparent}).ok());
  EXPECT_EQ(seen, std::vector<std::string>(2, kTraceparent));
  const CallResult bad =
      client->Forward(problem.args, problem.results, {.traceparent = "00-what-is-this"});
  EXPECT_EQ(bad.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(bad.status().message(), testing::HasSubstr("traceparent"));
  EXPECT_EQ(seen.size(), 2u);
}

TEST(Client, SmallInputsTravelInTheHeader) {
  int inline_tensors = 0, chunks = 0;
  FakeAttentionServer server(
      [&](int, const v1::ForwardHeader& header, auto*, ForwardStream* stream) {
        inline_tensors = header.inline_tensors_size();
        stream->Write(AcceptedFor(header));
        v1::ForwardRequest request;
        while (stream->Read(&request)) ++chunks;
        return FakeError{grpc::StatusCode::INTERNAL, "enough"}.ToStatus();
      });
  const auto client = ConnectTo(server);
  Problem small(86);  // 86 KiB of q with 21.5 KiB each of k and v exceed the limit
  EXPECT_EQ(client->Forward(small.args, small.results).status().code(),
            absl::StatusCode::kInternal);
  EXPECT_EQ(inline_tensors, 0);
  EXPECT_EQ(chunks, 3);
  chunks = 0;
  Problem smaller(85);
  EXPECT_EQ(client->Forward(smaller.args, smaller.results).status().code(),
            absl::StatusCode::kInternal);
  EXPECT_EQ(inline_tensors, 3);
  EXPECT_EQ(chunks, 0);
}

TEST(Client, InlineTensorsAreTheCallersBytes) {
  FakeAttentionServer server(
      [](int, const auto& header, auto*, auto* stream) { return Echo(header, stream); });
  Problem problem(8);
  ASSERT_TRUE(ConnectTo(server)->Forward(problem.args, problem.results).ok());
  EXPECT_EQ(problem.out, problem.q);
}

// Answers with the whole of Echo's reply in one message.
grpc::Status EchoAtOnce(const v1::ForwardHeader& header, ForwardStream* stream) {
  v1::ForwardResponse response;
  v1::SingleReply* single = response.mutable_single();
  *single->mutable_accepted() = AcceptedFor(header).accepted();
  for (const v1::TensorDescriptor& output : single->accepted().outputs()) {
    v1::TensorChunk* chunk = single->add_chunks();
    chunk->set_tensor(output.tensor());
    chunk->set_data(output.tensor() == v1::TENSOR_ID_OUT ? header.inline_tensors(0).data()
                                                         : std::string(output.bytes(), 'l'));
  }
  single->mutable_summary();
  stream->Write(response);
  return grpc::Status::OK;
}

TEST(Client, TakesASingleReplyIfAllInputsTravelInTheHeader) {
  bool asked = false, half_closed = false;
  FakeAttentionServer server(
      [&](int, const v1::ForwardHeader& header, auto*, ForwardStream* stream) {
        asked = header.reply().single_message();
        v1::ForwardRequest request;
        half_closed = !stream->Read(&request);  // the header is the client's last message
        return EchoAtOnce(header, stream);
      });
  Problem problem(8);
  const CallResult report = ConnectTo(server)->Forward(problem.args, problem.results);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_TRUE(asked);
  EXPECT_TRUE(half_closed);
  EXPECT_EQ(problem.out, problem.q);
  EXPECT_EQ(report->accepted.outputs_size(), 2);
}

TEST(Client, ASingleReplyThatWasNotRequestedIsAnError) {
  bool asked = true;
  FakeAttentionServer server(
      [&](int, const v1::ForwardHeader& header, auto*, ForwardStream* stream) {
        asked = header.reply().single_message();
        v1::ForwardResponse response;
        *response.mutable_single()->mutable_accepted() = AcceptedFor(header).accepted();
        stream->Write(response);
        return grpc::Status::OK;
      });
  Problem problem(86);
  const CallResult report = ConnectTo(server)->Forward(problem.args, problem.results);
  EXPECT_FALSE(asked);
  EXPECT_EQ(report.status().code(), absl::StatusCode::kInternal);
  EXPECT_THAT(report.status().message(), testing::HasSubstr("SingleReply"));
}

TEST(Client, ChunksCarryTheirCrcAndRespectTheServersSize) {
  uint64_t largest = 0, bytes = 0;
  bool all_have_crc = true;
  FakeAttentionServer server([&](int, const auto& header, auto*, ForwardStream* stream) {
    v1::ForwardResponse accepted = AcceptedFor(header);
    accepted.mutable_accepted()->set_max_chunk_bytes_up(10'000);
    stream->Write(accepted);
    v1::ForwardRequest request;
    while (stream->Read(&request)) {
      largest = std::max<uint64_t>(largest, request.chunk().data().size());
      bytes += request.chunk().data().size();
      all_have_crc &= request.chunk().has_crc32c();
    }
    return FakeError{grpc::StatusCode::INTERNAL, "enough"}.ToStatus();
  });
  Problem problem;
  const CallResult report = ConnectTo(server)->Forward(problem.args, problem.results);
  EXPECT_EQ(report.status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(largest, 10'000u);
  EXPECT_EQ(bytes, problem.q.size() + problem.k.size() + problem.v.size());
  EXPECT_TRUE(all_have_crc);
}

TEST(Client, NothingIsSentBeforeAccepted) {
  bool silent = true;
  FakeAttentionServer server([&](int, const auto& header, auto* context, ForwardStream* stream) {
    v1::ForwardRequest request;
    std::thread reader([&] { silent = !stream->Read(&request); });
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    context->TryCancel();
    reader.join();
    return FakeError{grpc::StatusCode::INVALID_ARGUMENT, "rejected"}.ToStatus();
  });
  Problem problem;
  EXPECT_FALSE(ConnectTo(server)->Forward(problem.args, problem.results).ok());
  EXPECT_TRUE(silent);
}

TEST(Client, EmptyTensorsNeedNoChunks) {
  FakeAttentionServer server([](int, const auto& header, auto*, ForwardStream* stream) {
    stream->Write(AcceptedFor(header));
    v1::ForwardRequest request;
    EXPECT_FALSE(stream->Read(&request));
    v1::ForwardResponse last;
    last.mutable_summary();
    stream->Write(last);
    return grpc::Status::OK;
  });
  Problem problem(0);
  const CallResult report = ConnectTo(server)->Forward(problem.args, problem.results);
  EXPECT_TRUE(report.ok()) << report.status();
}

TEST(Client, WrongBufferSizesAreRejectedLocally) {
  FakeAttentionServer server(
      [](int, const auto& header, auto*, auto* stream) { return Echo(header, stream); });
  const auto client = ConnectTo(server);
  Problem problem;
  problem.args.k.remove_suffix(2);
  absl::Status status = client->Forward(problem.args, problem.results).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("k has 255998 bytes"));

  Problem overflowing;
  overflowing.args.shape.set_batch(uint64_t{1} << 60);
  overflowing.args.shape.set_seq_len_q(uint64_t{1} << 60);
  bool called = false;
  status = client
               ->StartForward(overflowing.args, overflowing.results, {},
                              [&](const CallResult& result) { called = !result.ok(); })
               .Wait()
               .status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(called);
  EXPECT_EQ(server.calls(), 0);
}

TEST(Client, LostCallsAreReplayedUnderOneRequestId) {
  std::set<std::string> request_ids;
  FakeAttentionServer server([&](int call, const auto& header, auto*, ForwardStream* stream) {
    request_ids.insert(header.request_id());
    if (call == 0) {
      return FakeError{
          .code = grpc::StatusCode::UNAVAILABLE, .reason = "NO_RING", .retry_after_ms = 30}
          .ToStatus();
    }
    if (call == 1) {  // during the upload
      stream->Write(AcceptedFor(header));
      v1::ForwardRequest request;
      stream->Read(&request);
      return FakeError{.code = grpc::StatusCode::ABORTED, .reason = "WORKER_LOST"}.ToStatus();
    }
    if (call == 2) {  // during the download, after writing garbage
      stream->Write(AcceptedFor(header));
      ReadUpload(header, stream);
      SendChunk(stream, v1::TENSOR_ID_OUT, 0, std::string(5000, 'x'));
      return FakeError{.code = grpc::StatusCode::ABORTED, .reason = "WORKER_LOST"}.ToStatus();
    }
    return Echo(header, stream);
  });
  Problem problem;
  int accepted = 0;
  const CallResult report = ConnectTo(server)->Forward(
      problem.args, problem.results, {.on_accepted = [&](const v1::Accepted&) { ++accepted; }});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(accepted, 3);
  EXPECT_EQ(report->summary.attempts(), 4u);
  EXPECT_EQ(DetailsOf(report->last_failure).reason, "WORKER_LOST");
  EXPECT_GE(report->failed_seconds, 0.03);  // the first pause
  EXPECT_EQ(request_ids.size(), 1u);
  EXPECT_EQ(problem.out, problem.q);
}

// gRPC ends calls that a server has not started at shutdown without details.
TEST(Client, AnUnrequestedCancellationIsReplayed) {
  FakeAttentionServer server([](int call, const auto& header, auto*, ForwardStream* stream) {
    return call == 0 ? grpc::Status::CANCELLED : Echo(header, stream);
  });
  Problem problem;
  const CallResult result = ConnectTo(server)->Forward(problem.args, problem.results);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->summary.attempts(), 2u);
}

TEST(Client, ACancellationByCallIsFinal) {
  FakeAttentionServer server([](int, const auto&, auto*, auto*) {
    return FakeError{.code = grpc::StatusCode::CANCELLED, .reason = "CANCELLED"}.ToStatus();
  });
  Problem problem;
  EXPECT_EQ(ConnectTo(server)->Forward(problem.args, problem.results).status().code(),
            absl::StatusCode::kCancelled);
  EXPECT_EQ(server.calls(), 1);
}

TEST(Client, ReplaysAreBounded) {
  FakeAttentionServer server([](int, const auto&, auto*, auto*) {
    return FakeError{.code = grpc::StatusCode::ABORTED, .message = "lost", .reason = "WORKER_LOST"}
        .ToStatus();
  });
  Problem problem;
  const absl::Status status = ConnectTo(server)->Forward(problem.args, problem.results).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(DetailsOf(status).reason, "WORKER_LOST");
  EXPECT_THAT(std::string(status.message()), HasSubstr("after 4 replays"));
  EXPECT_EQ(server.calls(), 5);
}

TEST(Client, ASupersededCallIsNotReplayed) {
  FakeAttentionServer server([](int, const auto&, auto*, auto*) {
    return FakeError{.code = grpc::StatusCode::ABORTED, .reason = "SUPERSEDED"}.ToStatus();
  });
  Problem problem;
  EXPECT_EQ(ConnectTo(server)->Forward(problem.args, problem.results).status().code(),
            absl::StatusCode::kAborted);
  EXPECT_EQ(server.calls(), 1);
}

TEST(Client, RejectionsAreFinalAndKeepTheirDetails) {
  FakeAttentionServer server([](int, const auto&, auto*, auto*) {
    return FakeError{.code = grpc::StatusCode::INVALID_ARGUMENT,
                     .message = "bad request",
                     .reason = "INVALID_REQUEST",
                     .violations = {{"options.softcap", "must be > 0"}, {"shape.batch", "is 0"}}}
        .ToStatus();
  });
  Problem problem;
  const absl::Status status = ConnectTo(server)->Forward(problem.args, problem.results).status();
  EXPECT_EQ(server.calls(), 1);
  EXPECT_EQ(FormatError(status),
            "INVALID_ARGUMENT: bad request\n  options.softcap: must be > 0\n  shape.batch: is 0\n"
            "  reason: INVALID_REQUEST");
}

TEST(Client, AnAbsentServerFailsTheCallAfterConnectTimeout) {
  std::string address;
  {
    FakeAttentionServer server([](int, const auto&, auto*, auto*) { return grpc::Status::OK; });
    address = server.address();
  }
  ClientOptions options;
  options.retry.connect_timeout = absl::Milliseconds(300);
  Problem problem;
  const absl::Time start = absl::Now();
  const absl::Status status =
      (*Client::Connect(address, options))->Forward(problem.args, problem.results).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_LT(absl::Now() - start, absl::Seconds(3));
}

TEST(Client, TheDeadlineEndsAStalledCall) {
  FakeAttentionServer server(
      [](int, const auto& header, grpc::ServerContext* context, ForwardStream* stream) {
        stream->Write(AcceptedFor(header));  // and then reads nothing
        while (!context->IsCancelled()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
        return grpc::Status::CANCELLED;
      });
  Problem problem(200'000);  // 256 MiB: more than all buffers on the way
  const absl::Time start = absl::Now();
  const absl::Status status =
      ConnectTo(server)
          ->Forward(problem.args, problem.results, {.deadline = absl::Milliseconds(400)})
          .status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_LT(absl::Now() - start, absl::Seconds(3));
}

TEST(Client, TheDeadlineCoversReplays) {
  FakeAttentionServer server([](int, const auto&, auto*, auto*) {
    return FakeError{.code = grpc::StatusCode::UNAVAILABLE, .retry_after_ms = 1000}.ToStatus();
  });
  Problem problem;
  // The deadline passes in the pause before the third attempt, however long the others take.
  const absl::Status status =
      ConnectTo(server)
          ->Forward(problem.args, problem.results, {.deadline = absl::Milliseconds(1600)})
          .status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_LE(server.calls(), 2);
}

TEST(Client, CancelEndsAStreamAndABackoff) {
  absl::Notification streaming;
  FakeAttentionServer server([&](int call, const auto& header, grpc::ServerContext* context,
                                 ForwardStream* stream) {
    if (call > 0) {
      return FakeError{.code = grpc::StatusCode::UNAVAILABLE, .retry_after_ms = 60'000}.ToStatus();
    }
    stream->Write(AcceptedFor(header));
    streaming.Notify();
    while (!context->IsCancelled()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    return grpc::Status::CANCELLED;
  });
  const auto client = ConnectTo(server);
  Problem problem;
  const PendingCall stalled = client->StartForward(problem.args, problem.results);
  streaming.WaitForNotification();
  stalled.Cancel();
  EXPECT_EQ(stalled.Wait().status().code(), absl::StatusCode::kCancelled);

  const PendingCall pausing = client->StartForward(problem.args, problem.results);
  while (server.calls() < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const absl::Time start = absl::Now();
  pausing.Cancel();
  EXPECT_EQ(pausing.Wait().status().code(), absl::StatusCode::kCancelled);
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
  pausing.Cancel();
}

TEST(Client, DestructionEndsWhatIsInFlight) {
  FakeAttentionServer server(
      [&](int, const auto& header, grpc::ServerContext* context, ForwardStream* stream) {
        stream->Write(AcceptedFor(header));
        while (!context->IsCancelled()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
        return grpc::Status::CANCELLED;
      });
  Problem problem;
  for (int round = 0; round < 20; ++round) {
    auto client = ConnectTo(server);
    std::atomic<bool> done{false};
    const PendingCall operation = client->StartForward(problem.args, problem.results, {},
                                                       [&](const CallResult&) { done = true; });
    if (round % 2 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    client.reset();
    EXPECT_TRUE(done);
    EXPECT_EQ(operation.Wait().status().code(), absl::StatusCode::kCancelled);
  }
}

// Channels and calls come and go. Nothing may depend on who drops the last reference.
TEST(Client, ClientsMayBeShortLived) {
  FakeAttentionServer server(
      [](int, const auto& header, auto*, auto* stream) { return Echo(header, stream); });
  for (int round = 0; round < 100; ++round) {
    Problem problem(50);
    const CallResult report = ConnectTo(server)->Forward(problem.args, problem.results);
    ASSERT_TRUE(report.ok()) << report.status();
  }
}

// gRPC's shutdown in the last channel's destructor may take 10 s.
TEST(Client, GrpcOutlivesTheLastClient) {
  {
    FakeAttentionServer server(
        [](int, const auto& header, auto*, auto* stream) { return Echo(header, stream); });
    Problem problem(50);
    ASSERT_TRUE(ConnectTo(server)->Forward(problem.args, problem.results).ok());
  }
  EXPECT_EQ(grpc_is_initialized(), 1);
}

TEST(Client, ManyCallsAtOnce) {
  FakeAttentionServer server(
      [](int, const auto& header, auto*, auto* stream) { return Echo(header, stream); });
  const auto client = ConnectTo(server);
  constexpr int kCalls = 12;
  std::vector<Problem> problems(kCalls);
  std::vector<PendingCall> operations;
  std::atomic<int> done{0};
  for (Problem& problem : problems) {
    // The vectors have moved; point to them again.
    problem.args.q = BytesOf(problem.q);
    problem.args.k = BytesOf(problem.k);
    problem.args.v = BytesOf(problem.v);
    problem.results = {MutableBytesOf(problem.out), MutableBytesOf(problem.lse)};
    operations.push_back(client->StartForward(problem.args, problem.results, {},
                                              [&](const CallResult& r) { done += r.ok(); }));
  }
  for (const PendingCall& operation : operations) EXPECT_TRUE(operation.Wait().ok());
  EXPECT_EQ(done, kCalls);
  for (const Problem& problem : problems) EXPECT_EQ(problem.out, problem.q);
}

TEST(Client, ProgressIsReported) {
  FakeAttentionServer server([](int, const auto& header, auto*, ForwardStream* stream) {
    EXPECT_TRUE(header.reply().has_progress_interval());
    v1::ForwardResponse progress;
    progress.mutable_progress()->set_state(v1::REQUEST_STATE_QUEUED);
    const grpc::Status status = Echo(header, stream);
    return status;
  });
  std::map<int, double> last;
  CallOptions options;
  options.on_progress = [&](const v1::Progress& p) { last[p.state()] = p.fraction_done(); };
  Problem problem;
  ASSERT_TRUE(ConnectTo(server)->Forward(problem.args, problem.results, options).ok());
  EXPECT_EQ(last[v1::REQUEST_STATE_UPLOADING], 1.0);
  EXPECT_EQ(last[v1::REQUEST_STATE_DOWNLOADING], 1.0);
}

// --- Servers that violate the protocol --------------------------------------------

absl::Status StatusOfDownload(const std::function<void(ForwardStream*)>& download) {
  FakeAttentionServer server([&](int, const auto& header, auto*, ForwardStream* stream) {
    stream->Write(AcceptedFor(header));
    ReadUpload(header, stream);
    download(stream);
    v1::ForwardResponse last;
    last.mutable_summary();
    stream->Write(last);
    return grpc::Status::OK;
  });
  Problem problem;
  return ConnectTo(server)->Forward(problem.args, problem.results).status();
}

TEST(Client, DamagedChunksAreDataLoss) {
  const absl::Status status = StatusOfDownload([](ForwardStream* stream) {
    v1::ForwardResponse response;
    response.mutable_chunk()->set_tensor(v1::TENSOR_ID_OUT);
    response.mutable_chunk()->set_data("damaged");
    response.mutable_chunk()->set_crc32c(1);
    stream->Write(response);
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("crc32c"));
}

TEST(Client, MisplacedChunksAreRejected) {
  struct Case {
    v1::TensorId tensor;
    uint64_t offset;
    size_t bytes;
  };
  for (const Case& c : {Case{v1::TENSOR_ID_OUT, 1'024'000, 1}, Case{v1::TENSOR_ID_OUT, ~0ull, 2},
                        Case{v1::TENSOR_ID_LSE, 0, 40'000}, Case{v1::TENSOR_ID_Q, 0, 1}}) {
    const auto download = [&](ForwardStream* stream) {
      SendChunk(stream, c.tensor, c.offset, std::string(c.bytes, 'x'));
    };
    EXPECT_EQ(StatusOfDownload(download).code(), absl::StatusCode::kInternal);
  }
}

TEST(Client, OverlapsAndGapsAreRejected) {
  EXPECT_THAT(std::string(StatusOfDownload([](ForwardStream* stream) {
                            SendChunk(stream, v1::TENSOR_ID_OUT, 100, std::string(100, 'x'));
                            SendChunk(stream, v1::TENSOR_ID_OUT, 50, std::string(51, 'x'));
                          }).message()),
              HasSubstr("overlaps"));
  EXPECT_THAT(std::string(StatusOfDownload([](ForwardStream* stream) {
                            SendChunk(stream, v1::TENSOR_ID_OUT, 0, std::string(100, 'x'));
                          }).message()),
              HasSubstr("ended with 100 of"));
}

}  // namespace
}  // namespace ringattn::client
