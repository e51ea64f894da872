// Tests of calls that share a stream, against a service whose answers the test determines.
#include "client/stream/call_sharer.h"

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <grpcpp/create_channel.h>
#include <grpcpp/server_builder.h>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "client/api/client.h"
#include "client/testing/fake_attention_server.h"
#include "common/security/credentials.h"
#include "common/wire/grpc_slices.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::client {
namespace {

using testing::HasSubstr;

using CallsServerStream = grpc::ServerReaderWriter<v1::CallsResponse, v1::CallsRequest>;

// Serves Forward and Calls. Each answer is a SingleReply with zeros.
class SharingServer final : public v1::AttentionService::Service {
 public:
  // Serves a Calls stream; the default answers every request.
  using Handler = std::function<grpc::Status(int stream, CallsServerStream* calls)>;

  explicit SharingServer(Handler handler = nullptr, uint32_t max_calls = 64)
      : handler_(std::move(handler)), max_calls_(max_calls) {
    int port = 0;
    grpc::ServerBuilder builder;
    // A small and constant window, so that a server that does not read holds up its clients.
    builder.AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 65535);
    builder.AddListeningPort("127.0.0.1:0", TransportSecurity().ServerCredentials(), &port);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    address_ = "127.0.0.1:" + std::to_string(port);
  }
  ~SharingServer() override { server_->Shutdown(std::chrono::system_clock::now()); }

  grpc::Status Forward(
      grpc::ServerContext*,
      grpc::ServerReaderWriter<v1::ForwardResponse, v1::ForwardRequest>* stream) override {
    v1::ForwardRequest request;
    if (!stream->Read(&request)) return grpc::Status::CANCELLED;
    ++forwards;
    stream->Write(ReplyTo(request.header()));
    return grpc::Status::OK;
  }

  grpc::Status Calls(grpc::ServerContext*, CallsServerStream* calls) override {
    const int stream = streams++;
    return handler_ ? handler_(stream, calls) : Serve(calls);
  }

  grpc::Status Serve(CallsServerStream* calls) {
    v1::CallsRequest request;
    while (calls->Read(&request)) Answer(request, calls);
    return grpc::Status::OK;
  }

  void Answer(const v1::CallsRequest& message, CallsServerStream* calls) {
    v1::CallsResponse answer;
    for (const v1::CallRequest& request : message.requests()) {
      if (!request.has_forward()) continue;
      ++shared;
      v1::CallResponse& response = *answer.add_responses();
      response.set_call(request.call());
      *response.mutable_forward() = ReplyTo(request.forward().header());
      response.mutable_end();
    }
    most_in_message = std::max<int>(most_in_message, message.requests_size());
    if (answer.responses_size() > 0) calls->Write(answer);
  }

  v1::ForwardResponse ReplyTo(const v1::ForwardHeader& header) const {
    v1::ForwardResponse response;
    v1::SingleReply* single = response.mutable_single();
    *single->mutable_accepted() = AcceptedFor(header).accepted();
    single->mutable_accepted()->set_transport(v1::TRANSPORT_RELAY);
    single->mutable_accepted()->set_max_calls_per_stream(max_calls_);
    for (const v1::TensorDescriptor& output : single->accepted().outputs()) {
      v1::TensorChunk* chunk = single->add_chunks();
      chunk->set_tensor(output.tensor());
      chunk->set_data(std::string(output.bytes(), '\0'));
    }
    single->mutable_summary();
    return response;
  }

  const std::string& address() const { return address_; }

  std::atomic<int> forwards{0}, streams{0}, shared{0}, most_in_message{0};

 private:
  const Handler handler_;
  const uint32_t max_calls_;
  std::string address_;
  std::unique_ptr<grpc::Server> server_;
};

// The answer to a message with one request.
v1::CallsResponse Cancelled(const v1::CallsRequest& message) {
  v1::CallsResponse answer;
  v1::CallResponse& response = *answer.add_responses();
  response.set_call(message.requests(0).call());
  response.mutable_end()->set_code(grpc::StatusCode::CANCELLED);
  return answer;
}

struct SmallCall {
  explicit SmallCall(int tokens = 16) {
    args.shape.set_batch(1);
    args.shape.set_seq_len_q(tokens);
    args.shape.set_seq_len_kv(tokens);
    args.shape.set_num_heads(1);
    args.shape.set_head_dim(64);
    args.dtype = v1::DATA_TYPE_BFLOAT16;
    input.resize(tokens * 64 * 2, 1);
    out.resize(tokens * 64 * 2, 0xff);
    lse.resize(tokens * 4);
    args.q = args.k = args.v = BytesOf(input);
    results = {.out = MutableBytesOf(out), .lse = MutableBytesOf(lse)};
    options.transport = TransportPreference::kRelay;
  }

  ForwardArgs args;
  ForwardResults results;
  CallOptions options;
  std::vector<uint8_t> input, out, lse;
};

std::unique_ptr<Client> ConnectTo(const SharingServer& server, int replays = 4) {
  ClientOptions options;
  options.retry.initial_backoff = absl::Milliseconds(5);
  options.retry.max_replays = replays;
  return *Client::Connect(server.address(), options);
}

absl::Status CallOnce(Client* client, absl::Duration deadline = absl::Seconds(60),
                      int tokens = 16) {
  SmallCall call(tokens);
  call.options.deadline = deadline;
  const CallResult result = client->StartForward(call.args, call.results, call.options).Wait();
  if (result.ok()) {
    EXPECT_EQ(call.out, std::vector<uint8_t>(call.out.size(), 0));
  }
  return result.status();
}

TEST(CallSharer, CallsShareAStreamOnceTheServerHasSaidThatItServesThem) {
  SharingServer server;
  const auto client = ConnectTo(server);
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(CallOnce(client.get()).ok());
  EXPECT_EQ(server.forwards, 1);
  EXPECT_EQ(server.shared, 4);
  EXPECT_EQ(server.streams, 1);
}

TEST(CallSharer, AServerWithoutCallsIsNeverAskedForThem) {
  SharingServer server(nullptr, /*max_calls=*/0);
  const auto client = ConnectTo(server);
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(CallOnce(client.get()).ok());
  EXPECT_EQ(server.forwards, 5);
  EXPECT_EQ(server.streams, 0);
}

TEST(CallSharer, ManyThreads) {
  SharingServer server;
  const auto client = ConnectTo(server);
  ASSERT_TRUE(CallOnce(client.get()).ok());
  std::vector<std::thread> threads;
  std::atomic<int> failed{0};
  for (int i = 0; i < 16; ++i) {
    threads.emplace_back([&] {
      for (int call = 0; call < 50; ++call) failed += !CallOnce(client.get()).ok();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failed, 0);
  EXPECT_EQ(server.forwards + server.shared, 1 + 16 * 50);
  EXPECT_EQ(server.streams, 1);
}

TEST(CallSharer, CallsThatWaitLeaveInOneMessage) {
  absl::Notification go_on;
  SharingServer server([&](int, CallsServerStream* calls) {
    go_on.WaitForNotification();
    return server.Serve(calls);
  });
  const auto client = ConnectTo(server);
  ASSERT_TRUE(CallOnce(client.get()).ok());
  // Flow control admits the first 64 KiB until the server reads.
  std::vector<std::unique_ptr<SmallCall>> calls;
  std::vector<PendingCall> pending;
  for (int i = 0; i < 60; ++i) {
    calls.push_back(std::make_unique<SmallCall>());
    pending.push_back(client->StartForward(calls[i]->args, calls[i]->results, calls[i]->options));
  }
  go_on.Notify();
  for (const PendingCall& call : pending) EXPECT_TRUE(call.Wait().ok());
  EXPECT_EQ(server.shared, 60);
  EXPECT_GT(server.most_in_message, 1);
  EXPECT_LT(server.most_in_message, 60);  // a message has about 64 KiB
}

TEST(CallSharer, ClientsMayBeShortLived) {
  SharingServer server;
  for (int i = 0; i < 20; ++i) {
    const auto client = ConnectTo(server);
    for (int call = 0; call < 3; ++call) EXPECT_TRUE(CallOnce(client.get()).ok());
  }
  EXPECT_EQ(server.streams, 20);
}

// Answers the first message of a stream after `go_on`, and the others at once.
SharingServer::Handler AnswersAfter(absl::Notification& go_on, SharingServer& server) {
  return [&](int, CallsServerStream* calls) {
    v1::CallsRequest first;
    calls->Read(&first);
    go_on.WaitForNotification();
    server.Answer(first, calls);
    return server.Serve(calls);
  };
}

TEST(CallSharer, CallsBeyondTheServersNumberOpenFurtherStreams) {
  absl::Notification go_on;
  SharingServer server(AnswersAfter(go_on, server), /*max_calls=*/1);
  const auto client = ConnectTo(server);
  ASSERT_TRUE(CallOnce(client.get()).ok());
  const int most = CallSharer::Options().most_streams;
  std::vector<std::unique_ptr<SmallCall>> calls;
  std::vector<PendingCall> pending;
  for (int i = 0; i < most; ++i) {
    calls.push_back(std::make_unique<SmallCall>());
    pending.push_back(client->StartForward(calls[i]->args, calls[i]->results, calls[i]->options));
  }
  // All streams are full.
  ASSERT_TRUE(CallOnce(client.get()).ok());
  EXPECT_EQ(server.forwards, 2);
  go_on.Notify();
  for (const PendingCall& call : pending) EXPECT_TRUE(call.Wait().ok());
  EXPECT_EQ(server.shared, most);
  EXPECT_EQ(server.streams, most);
  // A lone call takes one that is open.
  ASSERT_TRUE(CallOnce(client.get()).ok());
  EXPECT_EQ(server.streams, most);
  EXPECT_EQ(server.forwards, 2);
}

TEST(CallSharer, ARefusedStreamLeavesTheOthersInUse) {
  absl::Notification go_on;
  SharingServer server(
      [&, first = AnswersAfter(go_on, server)](int stream, CallsServerStream* calls) {
        if (stream == 0) return first(stream, calls);
        return grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "too many streams");
      },
      /*max_calls=*/1);
  const auto client = ConnectTo(server);
  ASSERT_TRUE(CallOnce(client.get()).ok());
  SmallCall waits;
  const PendingCall pending = client->StartForward(waits.args, waits.results, waits.options);
  // The refused stream's call takes an RPC, and the next one does not try again.
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(CallOnce(client.get()).ok());
  EXPECT_EQ(server.forwards, 3);
  EXPECT_EQ(server.streams, 2);
  go_on.Notify();
  EXPECT_TRUE(pending.Wait().ok());
  ASSERT_TRUE(CallOnce(client.get()).ok());
  EXPECT_EQ(server.shared, 2);
  EXPECT_EQ(server.forwards, 3);
}

TEST(CallSharer, ACallCanBeCancelledWhileTheStreamHasManyCalls) {
  std::atomic<int> begun{0};
  SharingServer server(
      [&](int stream, CallsServerStream* calls) {
        if (stream > 0) return server.Serve(calls);
        v1::CallsRequest message;
        int open = 0;
        // As the server does, it reads no further while the stream has all its calls.
        while (open < 4 && calls->Read(&message)) {
          v1::CallsResponse answer;
          for (const v1::CallRequest& request : message.requests()) {
            if (!request.cancel()) {
              begun = ++open;
              continue;
            }
            v1::CallResponse& response = *answer.add_responses();
            response.set_call(request.call());
            response.mutable_end()->set_code(grpc::StatusCode::CANCELLED);
          }
          if (answer.responses_size() > 0) calls->Write(answer);
        }
        return grpc::Status(grpc::StatusCode::INTERNAL, "the stream is full");
      },
      /*max_calls=*/4);
  const auto client = ConnectTo(server);
  ASSERT_TRUE(CallOnce(client.get()).ok());
  std::vector<std::unique_ptr<SmallCall>> calls;
  std::vector<PendingCall> pending;
  for (int i = 0; i < 5; ++i) {
    calls.push_back(std::make_unique<SmallCall>());
    pending.push_back(client->StartForward(calls[i]->args, calls[i]->results, calls[i]->options));
  }
  while (begun < 3) absl::SleepFor(absl::Milliseconds(1));
  for (int i = 3; i < 5; ++i) EXPECT_TRUE(pending[i].Wait().ok());  // on another stream
  for (int i = 0; i < 3; ++i) pending[i].Cancel();
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(absl::IsCancelled(pending[i].Wait().status()));
  EXPECT_EQ(server.streams, 2);
}

TEST(CallSharer, TheCallsOfALostStreamAreReplayed) {
  SharingServer server([&](int stream, CallsServerStream* calls) -> grpc::Status {
    v1::CallsRequest request;
    if (stream > 0) return server.Serve(calls);
    for (int calls_read = 0; calls_read < 3; calls_read += request.requests_size()) {
      if (!calls->Read(&request)) break;
    }
    return {grpc::StatusCode::UNAVAILABLE, "the test ends it"};
  });
  const auto client = ConnectTo(server);
  ASSERT_TRUE(CallOnce(client.get()).ok());
  std::vector<std::thread> threads;
  std::atomic<int> failed{0};
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] { failed += !CallOnce(client.get()).ok(); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failed, 0);
  EXPECT_GE(server.streams, 2);
}

TEST(CallSharer, AStreamThatEndsWellFailsItsCalls) {
  SharingServer server([](int, CallsServerStream* calls) {
    v1::CallsRequest request;
    calls->Read(&request);
    return grpc::Status::OK;
  });
  const auto client = ConnectTo(server, /*replays=*/0);
  ASSERT_TRUE(CallOnce(client.get()).ok());
  const absl::Status status = CallOnce(client.get());
  EXPECT_TRUE(absl::IsUnavailable(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("the server ended the Calls stream"));
}

TEST(CallSharer, AReplacedServerWithoutCallsIsServedByRpcs) {
  SharingServer server([](int, CallsServerStream*) {
    return grpc::Status(grpc::StatusCode::UNIMPLEMENTED, "no Calls");
  });
  const auto client = ConnectTo(server);
  ASSERT_TRUE(CallOnce(client.get()).ok());
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(CallOnce(client.get()).ok());
  EXPECT_EQ(server.forwards, 4);
  EXPECT_EQ(server.streams, 1);
}

TEST(CallSharer, AnErrorOfACallIsItsOwn) {
  SharingServer server([&](int, CallsServerStream* calls) {
    v1::CallsRequest request;
    calls->Read(&request);
    v1::CallsResponse answer;
    v1::CallResponse& response = *answer.add_responses();
    response.set_call(request.requests(0).call());
    const grpc::Status error = FakeError{
        .code = grpc::StatusCode::INVALID_ARGUMENT,
        .message = "wrong",
        .violations = {{"shape.batch",
                        "is odd"}}}.ToStatus();
    response.mutable_end()->ParseFromString(error.error_details());
    calls->Write(answer);
    return server.Serve(calls);
  });
  const auto client = ConnectTo(server);
  ASSERT_TRUE(CallOnce(client.get()).ok());
  const absl::Status status = CallOnce(client.get());
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_EQ(DetailsOf(status).violations[0].field, "shape.batch");
  EXPECT_TRUE(CallOnce(client.get()).ok());
  EXPECT_EQ(server.streams, 1);
}

TEST(CallSharer, ACancellationReachesTheServer) {
  absl::Notification begun;
  std::atomic<bool> cancelled{false};
  SharingServer server([&](int, CallsServerStream* calls) {
    v1::CallsRequest request, cancel;
    calls->Read(&request);
    begun.Notify();
    calls->Read(&cancel);
    cancelled =
        cancel.requests(0).cancel() && cancel.requests(0).call() == request.requests(0).call();
    calls->Write(Cancelled(request));
    return server.Serve(calls);
  });
  const auto client = ConnectTo(server);
  ASSERT_TRUE(CallOnce(client.get()).ok());
  SmallCall call;
  PendingCall pending = client->StartForward(call.args, call.results, call.options);
  begun.WaitForNotification();
  pending.Cancel();
  EXPECT_TRUE(absl::IsCancelled(pending.Wait().status()));
  EXPECT_TRUE(cancelled);
  EXPECT_TRUE(CallOnce(client.get()).ok());
}

TEST(CallSharer, ASilentServerEndsNoCallButTheDeadlineDoes) {
  SharingServer server([&](int, CallsServerStream* calls) {
    v1::CallsRequest request;
    bool answers = false;
    while (calls->Read(&request)) {
      if (answers) server.Answer(request, calls);
      answers = true;
    }
    return grpc::Status::OK;
  });
  const auto client = ConnectTo(server);
  ASSERT_TRUE(CallOnce(client.get()).ok());
  const absl::Time begin = absl::Now();
  EXPECT_TRUE(absl::IsDeadlineExceeded(CallOnce(client.get(), absl::Milliseconds(300))));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(5));
  EXPECT_TRUE(CallOnce(client.get()).ok());
}

// Flow control admits fewer messages, so the last ones are never written.
TEST(CallSharer, CallsEndAtTheirDeadlineIfTheServerDoesNotRead) {
  absl::Notification go_on;
  SharingServer server([&](int, CallsServerStream*) {
    go_on.WaitForNotification();
    return grpc::Status::OK;
  });
  const auto client = ConnectTo(server);
  ASSERT_TRUE(CallOnce(client.get()).ok());
  std::vector<std::thread> threads;
  std::atomic<int> late{0};
  for (int i = 0; i < 60; ++i) {
    threads.emplace_back([&] {
      late += absl::IsDeadlineExceeded(CallOnce(client.get(), absl::Milliseconds(500), 128));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(late, 60);
  go_on.Notify();
}

TEST(CallSharer, AClientWithCallsInProgressEnds) {
  absl::Notification begun;
  SharingServer server([&](int, CallsServerStream* calls) {
    v1::CallsRequest request;
    calls->Read(&request);
    begun.Notify();
    while (calls->Read(&request)) {
      if (request.requests(0).cancel()) calls->Write(Cancelled(request));
    }
    return grpc::Status::OK;
  });
  auto client = ConnectTo(server);
  ASSERT_TRUE(CallOnce(client.get()).ok());
  SmallCall call;
  const PendingCall pending = client->StartForward(call.args, call.results, call.options);
  begun.WaitForNotification();
  client = nullptr;
  EXPECT_TRUE(absl::IsCancelled(pending.Wait().status()));
}

TEST(CallSharer, GarbageEndsTheStreamWithAnError) {
  SharingServer server([&](int, CallsServerStream* calls) {
    v1::CallsRequest request;
    calls->Read(&request);
    v1::CallsResponse answer;
    v1::CallResponse& response = *answer.add_responses();
    response.set_call(request.requests(0).call());
    response.mutable_forward();
    response.GetReflection()->MutableUnknownFields(&response)->AddLengthDelimited(5, "again");
    calls->Write(answer);
    calls->Read(&request);
    return grpc::Status::OK;
  });
  const auto client = ConnectTo(server, /*replays=*/0);
  ASSERT_TRUE(CallOnce(client.get()).ok());
  const absl::Status status = CallOnce(client.get());
  EXPECT_TRUE(absl::IsInternal(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("several messages"));
}

// A User that records what happens.
struct Recorder : CallStream::User {
  void OnReadDone(bool ok) override {
    reads += ok;
    if (ok) stream->Read(&buffer);
  }
  void OnWriteDone(bool) override { ++writes; }
  void OnDone(const grpc::Status& end) override {
    status = end;
    done.Notify();
  }

  std::unique_ptr<CallStream> stream;
  grpc::ByteBuffer buffer, message;
  std::atomic<int> reads{0}, writes{0};
  grpc::Status status;
  absl::Notification done;
};

TEST(CallSharer, ACallThatIsCancelledInSilenceEndsSoon) {
  SharingServer server([](int, CallsServerStream* calls) {
    v1::CallsRequest request;
    while (calls->Read(&request)) {
    }
    return grpc::Status::OK;
  });
  const auto channel =
      grpc::CreateChannel(server.address(), TransportSecurity().ChannelCredentials());
  CallSharer::Options options;
  options.cancel_grace = absl::Milliseconds(200);
  CallSharer sharer(channel, nullptr, options);
  Recorder call;
  EXPECT_EQ(sharer.Open({}, &call), nullptr);  // the server has not answered yet
  sharer.Learn(8);
  call.stream = sharer.Open({}, &call);
  ASSERT_NE(call.stream, nullptr);
  call.message = wire::SerializeProto(v1::ForwardRequest());
  call.stream->WriteLast(&call.message);
  call.stream->Read(&call.buffer);
  call.stream->Start();
  call.stream->TryCancel();
  call.done.WaitForNotification();
  EXPECT_EQ(call.status.error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_EQ(call.writes, 1);
  call.stream = nullptr;

  Recorder unsent;
  unsent.stream = sharer.Open({}, &unsent);
  unsent.stream->TryCancel();
  unsent.stream->Start();
  unsent.done.WaitForNotification();
  EXPECT_EQ(unsent.status.error_code(), grpc::StatusCode::CANCELLED);
  unsent.stream = nullptr;
}

TEST(CallSharer, AnIdleStreamEndsAndANewOneFollows) {
  SharingServer server;
  const auto channel =
      grpc::CreateChannel(server.address(), TransportSecurity().ChannelCredentials());
  CallSharer::Options options;
  options.idle = absl::Milliseconds(100);
  CallSharer sharer(channel, nullptr, options);
  sharer.Learn(8);
  for (int i = 0; i < 2; ++i) {
    SmallCall small;
    Recorder call;
    call.stream = sharer.Open({}, &call);
    ASSERT_NE(call.stream, nullptr);
    v1::ForwardRequest request;
    *request.mutable_header()->mutable_shape() = small.args.shape;
    request.mutable_header()->set_dtype(small.args.dtype);
    call.message = wire::SerializeProto(request);
    call.stream->WriteLast(&call.message);
    call.stream->Read(&call.buffer);
    call.stream->Start();
    call.done.WaitForNotification();
    EXPECT_TRUE(call.status.ok()) << call.status.error_message();
    EXPECT_EQ(call.reads, 1);
    call.stream = nullptr;
    absl::SleepFor(absl::Milliseconds(600));
  }
  EXPECT_EQ(server.streams, 2);
}

}  // namespace
}  // namespace ringattn::client
