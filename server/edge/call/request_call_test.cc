// Tests of RequestCall over a real gRPC stream. The data plane does what the test specifies, and
// the core has no workers, so the test answers in its place.
#include "server/edge/call/request_call.h"

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <grpcpp/create_channel.h>
#include <grpcpp/server_builder.h>

#include "absl/synchronization/notification.h"
#include "common/base/monotonic_time.h"
#include "common/observability/metrics.h"
#include "common/security/credentials.h"
#include "gtest/gtest.h"
#include "ringattn/v1/attention.grpc.pb.h"
#include "server/edge/services/attention_service.h"
#include "server/edge/testing/test_support.h"

namespace ringattn::server {
namespace {

using grpc::StatusCode;

// A data plane in which each step waits until the test opens its gate.
class GatedPlane final : public DataPlane {
 public:
  explicit GatedPlane(std::shared_ptr<TransferListener> with) : listener(std::move(with)) {}

  std::optional<Failure> Open() override { return Pass(opening, may_open); }
  std::optional<Failure> Feed(const grpc::ByteBuffer&) override { return Pass(feeding, may_feed); }
  void Drain() override { Pass(draining, may_drain); }
  bool HasRoom() const override { return true; }
  bool complete() const override { return false; }
  Failure Incomplete() const override {
    return {absl::StatusCode::kInvalidArgument, "incomplete", "BAD_CHUNK", {}, "chunk.data"};
  }
  void Delivered(int64_t) override {}
  TransferStalls Look() override { return {}; }
  TransferTotals totals() const override { return {}; }
  void Stop() override { stopped = true; }

  const std::shared_ptr<TransferListener> listener;
  absl::Notification opening, may_open, feeding, may_feed, draining, may_drain;
  std::atomic<bool> stopped = false;

 private:
  static std::optional<Failure> Pass(absl::Notification& here, absl::Notification& gate) {
    here.Notify();
    gate.WaitForNotification();
    return std::nullopt;
  }
};

// The server's parts around a call. The core rejects every request because it has no ring, but the
// call is not informed.
class Edge final : public ActionSink {
 public:
  explicit Edge(const Limits& limits = {})
      : registry(limits), server_metrics_(&metrics_, limits), callers_(nullptr, limits, &metrics_) {
    CoordinatorConfig config;
    config.tick_interval = absl::Milliseconds(5);
    core_ = std::make_unique<CoreLoop>(config, this);
    context_.limits = limits;
    context_.core = core_.get();
    context_.registry = &registry;
    context_.metrics = &server_metrics_;
    context_.callers = &callers_;
    context_.report_interval = absl::Milliseconds(10);
    context_.cancel_notice = absl::Milliseconds(50);
    context_.make_data_plane = [this](TransferSpec, std::shared_ptr<TransferListener> listener) {
      auto made = std::make_shared<GatedPlane>(std::move(listener));
      absl::MutexLock lock(&mutex_);
      plane_ = made;
      return made;
    };
    service_ = std::make_unique<AttentionServiceImpl>(&context_);
    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", TransportSecurity().ServerCredentials(), &port);
    builder.RegisterService(service_.get());
    server_ = builder.BuildAndStart();
    core_->Start();
    target_ = "127.0.0.1:" + std::to_string(port);
    stub = NewStub();
  }

  ~Edge() override {
    server_->Shutdown(std::chrono::system_clock::now());
    core_->Stop();
  }

  // Uses its own connection.
  std::unique_ptr<v1::AttentionService::Stub> NewStub(
      grpc::ChannelArguments arguments = grpc::ChannelArguments()) const {
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return v1::AttentionService::NewStub(
        grpc::CreateCustomChannel(target_, TransportSecurity().ChannelCredentials(), arguments));
  }

  void CarryOut(Action action, const Coordinator&) override {
    refused += std::holds_alternative<FailRequest>(action);
  }
  void OnTick(absl::Time now, const Coordinator& core) override {
    for (const auto& call : registry.All())
      call->OnTick(now + absl::Milliseconds(ahead_ms.load()), core);
    ++ticks;
  }

  // Advances the calls' clock by this time; they have seen it when this returns.
  bool Advance(absl::Duration time) {
    ahead_ms += absl::ToInt64Milliseconds(time);
    return Ticks();
  }

  // Runs one round of the core's thread.
  bool Ticks() {
    const int before = ticks;
    return WaitUntil([&] { return ticks > before + 2; });
  }

  std::shared_ptr<GatedPlane> WaitForPlane() {
    WaitUntil([this] {
      absl::MutexLock lock(&mutex_);
      return plane_ != nullptr;
    });
    absl::MutexLock lock(&mutex_);
    return plane_;
  }

  const RequestContext* context() const { return &context_; }

  RequestRegistry registry;
  std::unique_ptr<v1::AttentionService::Stub> stub;
  std::atomic<int> refused = 0;
  std::atomic<int> ticks = 0;
  std::atomic<int64_t> ahead_ms = 0;

 private:
  Metrics metrics_;
  ServerMetrics server_metrics_;
  Callers callers_;
  absl::Mutex mutex_;
  std::shared_ptr<GatedPlane> plane_ ABSL_GUARDED_BY(mutex_);
  RequestContext context_;
  std::unique_ptr<CoreLoop> core_;
  std::unique_ptr<AttentionServiceImpl> service_;
  std::unique_ptr<grpc::Server> server_;
  std::string target_;
};

v1::ForwardRequest Header() {
  v1::ForwardRequest request;
  v1::AttentionShape* shape = request.mutable_header()->mutable_shape();
  shape->set_batch(1);
  shape->set_seq_len_q(4);
  shape->set_seq_len_kv(4);
  shape->set_num_heads(1);
  shape->set_head_dim(4);
  request.mutable_header()->set_dtype(v1::DATA_TYPE_FLOAT32);
  return request;
}

Failure Lost() {
  Failure failure;
  failure.code = absl::StatusCode::kAborted;
  failure.message = "lost";
  failure.reason = "WORKER_LOST";
  return failure;
}

// A call that has just been accepted and whose data plane is being opened.
struct AcceptedCall {
  explicit AcceptedCall(Edge* edge) {
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
    stream = edge->stub->Forward(&context);
    stream->Write(Header());
    EXPECT_TRUE(WaitUntil([edge] { return edge->refused == 1; }));
    call = edge->registry.All().at(0);
    AcceptRequest accept;
    accept.request_id = "test";
    accept.generation = 1;
    Plan plan;
    plan.shards.q = plan.shards.kv = {Shard{}};
    plan.buffer_bytes = plan.tiles = plan.sent_bytes = {0};
    accept.plan = std::make_shared<const Plan>(plan);
    call->Accept(accept);
    plane = edge->WaitForPlane();
    plane->opening.WaitForNotification();
  }
  ~AcceptedCall() {
    for (absl::Notification* gate : {&plane->may_open, &plane->may_feed, &plane->may_drain}) {
      if (!gate->HasBeenNotified()) gate->Notify();
    }
    call->Fail(Lost());  // unless it has ended
  }

  grpc::Status End() {
    v1::ForwardResponse response;
    while (stream->Read(&response)) {
    }
    return stream->Finish();
  }

  void SendChunk() {
    v1::ForwardRequest request;
    request.mutable_chunk()->set_data("x");
    stream->Write(request);
  }

  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReaderWriter<v1::ForwardRequest, v1::ForwardResponse>> stream;
  std::shared_ptr<RequestCall> call;
  std::shared_ptr<GatedPlane> plane;
};

// A stream whose messages the test delivers.
class ManualStream final : public ClientStream {
 public:
  void SetUser(User* user) override {
    user_ = user;
    if (on_user) on_user(static_cast<RequestCall*>(user));
  }
  void Read(grpc::ByteBuffer*) override { ++reads; }
  void Write(const grpc::ByteBuffer*, bool) override {}
  void WriteAndFinish(const grpc::ByteBuffer*, const grpc::Status&) override {}
  void Finish(const grpc::Status& status) override { end = status; }
  bool IsCancelled() const override { return false; }
  void TryCancel() override {}
  void CutOff(const grpc::Status&) override {}
  User* user() const { return user_; }

  std::function<void(RequestCall*)> on_user;
  int reads = 0;
  std::optional<grpc::Status> end;

 private:
  User* user_ = nullptr;
};

// A shared stream delivers the first message at once, before the call would have its number.
TEST(RequestCallTest, ATickBeforeTheCallBeginsStartsNothing) {
  Edge edge;
  ManualStream stream;
  stream.on_user = [&stream](RequestCall* call) {
    call->OnTick(MonotonicNow(), Coordinator(CoordinatorConfig()));
    EXPECT_EQ(stream.reads, 0);
  };
  RequestCall::Serve(edge.context(), &stream, Direction::kForward, Caller(), CallOrigin());
  EXPECT_EQ(stream.reads, 1);
  stream.user()->OnCancel();
  stream.user()->OnReadDone(false);
  ASSERT_TRUE(stream.end.has_value());
  EXPECT_EQ(stream.end->error_code(), StatusCode::CANCELLED);
  stream.user()->OnDone();
}

// Closes one gate at a time, because gRPC may queue its next work on the thread that waits here.
TEST(RequestCallTest, TheCoreDoesNotWaitForAnOpeningDataPlane) {
  Edge edge;
  AcceptedCall accepted(&edge);
  EXPECT_TRUE(edge.Ticks());
}

TEST(RequestCallTest, TheCoreDoesNotWaitForAChunkInFlight) {
  Edge edge;
  AcceptedCall accepted(&edge);
  accepted.plane->may_open.Notify();
  accepted.SendChunk();
  accepted.plane->feeding.WaitForNotification();
  EXPECT_TRUE(edge.Ticks());
  // The core's decision takes effect meanwhile.
  accepted.call->Fail(Lost());
  EXPECT_TRUE(accepted.plane->stopped);
  accepted.plane->may_feed.Notify();
  EXPECT_EQ(accepted.End().error_code(), StatusCode::ABORTED);
}

TEST(RequestCallTest, TheCoreDoesNotWaitForOutputsBeingMerged) {
  Edge edge;
  AcceptedCall accepted(&edge);
  accepted.plane->may_open.Notify();
  accepted.call->Download(BeginDownload{});
  accepted.plane->draining.WaitForNotification();
  EXPECT_TRUE(edge.Ticks());
  accepted.call->Fail(Lost());
  EXPECT_TRUE(accepted.plane->stopped);
  accepted.plane->may_drain.Notify();
  EXPECT_EQ(accepted.End().error_code(), StatusCode::ABORTED);
}

TEST(RequestCallTest, ADownloadThatBeginsWhileTheDataPlaneOpensStarts) {
  Edge edge;
  AcceptedCall accepted(&edge);
  accepted.call->Download(BeginDownload{});
  EXPECT_FALSE(accepted.plane->draining.HasBeenNotified());
  accepted.plane->may_open.Notify();
  accepted.plane->draining.WaitForNotification();
  accepted.plane->may_drain.Notify();
  accepted.call->Succeed(FinishRequest{});
  EXPECT_TRUE(accepted.End().ok());
}

// A call that has succeeded, with a summary larger than HTTP/2's window of 64 KiB: the write stays
// pending until the client reads.
struct CallWithALongSummary {
  explicit CallWithALongSummary(Edge* edge) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 64 << 10);
    edge->stub = edge->NewStub(arguments);
    accepted = std::make_unique<AcceptedCall>(edge);
    accepted->plane->may_open.Notify();
    BeginDownload begin;
    v1::RankReport& report = begin.reports.emplace_back();
    for (int i = 0; i < 10'000; ++i)
      report.add_timeline()->set_name("a step of a long computation");
    accepted->call->Download(begin);
    accepted->plane->draining.WaitForNotification();
    accepted->plane->may_drain.Notify();
    accepted->call->Succeed(FinishRequest{});
  }

  std::unique_ptr<AcceptedCall> accepted;
};

TEST(RequestCallTest, TheIdleLimitAppliesToTheSummary) {
  Edge edge;
  CallWithALongSummary call(&edge);
  // Longer than the status of a failed call waits.
  ASSERT_TRUE(edge.Advance(Limits().download_idle_timeout - absl::Seconds(5)));
  const grpc::Status status = call.accepted->End();
  EXPECT_TRUE(status.ok()) << status.error_message();
}

TEST(RequestCallTest, AClientThatNeverReadsTheSummaryGetsAStatus) {
  Edge edge;
  CallWithALongSummary call(&edge);
  ASSERT_TRUE(edge.Advance(Limits().download_idle_timeout + absl::Milliseconds(1)));
  const grpc::Status status = call.accepted->End();
  EXPECT_EQ(status.error_code(), StatusCode::DEADLINE_EXCEEDED);
  EXPECT_EQ(status.error_message(), "the client took no bytes of the result for 30s");
}

// A call whose inline operation has run. The core reports it in one batch of actions.
struct InlineCall {
  InlineCall(Edge* edge, const BeginDownload& begin, const v1::ReplyOptions& reply = {},
             v1::Transport transport = v1::TRANSPORT_RELAY) {
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
    stream = edge->stub->Forward(&context);
    v1::ForwardRequest header = Header();
    *header.mutable_header()->mutable_reply() = reply;
    stream->Write(header);
    EXPECT_TRUE(WaitUntil([edge] { return edge->refused == 1; }));
    const std::shared_ptr<RequestCall> call = edge->registry.All().at(0);
    AcceptRequest accept;
    accept.request_id = "test";
    accept.generation = 1;
    accept.is_inline = true;
    accept.transport = transport;
    Plan plan;
    plan.recipe.layout = Layout::kContiguous;
    plan.shards.q = plan.shards.kv = {Shard{}};
    plan.buffer_bytes = plan.tiles = plan.sent_bytes = {0};
    accept.plan = std::make_shared<const Plan>(plan);
    call->Accept(accept);
    call->Download(begin);
    call->Succeed(FinishRequest{});
  }

  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReaderWriter<v1::ForwardRequest, v1::ForwardResponse>> stream;
};

BeginDownload InlineOutputs() {
  BeginDownload begin;
  for (const auto& [id, bytes] :
       {std::pair(v1::TENSOR_ID_OUT, 64), std::pair(v1::TENSOR_ID_LSE, 16)}) {
    v1::TensorChunk* output = begin.outputs.Add();
    output->set_tensor(id);
    output->set_data(std::string(bytes, 'o'));
  }
  return begin;
}

TEST(RequestCallTest, AnInlineOperationIsAnsweredAtOnce) {
  Edge edge;
  InlineCall call(&edge, InlineOutputs());
  std::vector<v1::ForwardResponse> responses(5);
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(call.stream->Read(&responses[i]));
  EXPECT_FALSE(call.stream->Read(&responses[4]));
  EXPECT_EQ(responses[0].accepted().request_id(), "test");
  EXPECT_EQ(responses[1].chunk().data(), std::string(64, 'o'));
  EXPECT_EQ(responses[2].chunk().tensor(), v1::TENSOR_ID_LSE);
  EXPECT_TRUE(responses[3].has_summary());
  EXPECT_TRUE(call.stream->Finish().ok());
}

TEST(RequestCallTest, AClientMayTakeAnInlineOperationsAnswerInOneMessage) {
  Edge edge;
  v1::ReplyOptions reply;
  reply.set_single_message(true);
  reply.set_with_crc32c(true);
  InlineCall call(&edge, InlineOutputs(), reply);
  v1::ForwardResponse response;
  ASSERT_TRUE(call.stream->Read(&response));
  const v1::SingleReply single = response.single();
  EXPECT_EQ(single.accepted().request_id(), "test");
  ASSERT_EQ(single.chunks_size(), 2);
  EXPECT_EQ(single.chunks(0).data(), std::string(64, 'o'));
  EXPECT_TRUE(single.chunks(0).has_crc32c());
  EXPECT_EQ(single.chunks(1).tensor(), v1::TENSOR_ID_LSE);
  EXPECT_TRUE(single.has_summary());
  EXPECT_FALSE(call.stream->Read(&response));
  EXPECT_TRUE(call.stream->Finish().ok());
}

TEST(RequestCallTest, OutputsInTheClientsMemoryNeedNoMessage) {
  for (const v1::Transport transport : {v1::TRANSPORT_HOST_MEMORY, v1::TRANSPORT_CUDA_MEMORY}) {
    for (const bool single : {false, true}) {
      Edge edge;
      v1::ReplyOptions reply;
      reply.set_single_message(single);
      InlineCall call(&edge, BeginDownload{}, reply, transport);
      v1::ForwardResponse response;
      ASSERT_TRUE(call.stream->Read(&response));
      const v1::Accepted accepted = single ? response.single().accepted() : response.accepted();
      EXPECT_EQ(accepted.transport(), transport);
      if (!single) {
        ASSERT_TRUE(call.stream->Read(&response));
      }
      const v1::Summary summary = single ? response.single().summary() : response.summary();
      EXPECT_GT(summary.bytes_down(), 0u);
      EXPECT_FALSE(call.stream->Read(&response));
      EXPECT_TRUE(call.stream->Finish().ok());
    }
  }
}

TEST(RequestCallTest, ASingleReplyIsNotLargerThanTheClientsChunks) {
  Limits limits;
  limits.min_chunk_bytes_down = 16;
  Edge edge(limits);
  v1::ReplyOptions reply;
  reply.set_single_message(true);
  reply.set_max_chunk_bytes(79);  // the outputs have 80
  InlineCall call(&edge, InlineOutputs(), reply);
  v1::ForwardResponse response;
  int messages = 0;
  for (; call.stream->Read(&response); ++messages) EXPECT_FALSE(response.has_single());
  EXPECT_EQ(messages, 4);
  EXPECT_TRUE(call.stream->Finish().ok());
}

TEST(RequestCallTest, OutputsThatAreNotTheRequestsEndAnInlineCall) {
  Edge edge;
  InlineCall call(&edge, BeginDownload{});
  v1::ForwardResponse response;
  while (call.stream->Read(&response)) EXPECT_FALSE(response.has_summary());
  const grpc::Status status = call.stream->Finish();
  EXPECT_EQ(status.error_code(), StatusCode::INTERNAL);
  EXPECT_NE(status.error_details().find("BAD_OUTPUTS"), std::string::npos);
}

TEST(RequestCallTest, ACallThatEndsWhileItsDataPlaneOpensStopsIt) {
  Edge edge;
  AcceptedCall accepted(&edge);
  accepted.call->Fail(Lost());
  EXPECT_FALSE(accepted.plane->stopped);
  accepted.plane->may_open.Notify();
  EXPECT_EQ(accepted.End().error_code(), StatusCode::ABORTED);
  EXPECT_TRUE(WaitUntil([&] { return accepted.plane->stopped.load(); }));
}

// After a disconnection, gRPC first reports the end of messages and then the cancellation.
TEST(RequestCallTest, ABrokenStreamIsNotAHalfClose) {
  Edge edge;
  grpc::ClientContext context;
  const auto stream = edge.stub->Forward(&context);
  ASSERT_TRUE(WaitUntil([&] { return edge.registry.All().size() == 1; }));
  const std::shared_ptr<RequestCall> call = edge.registry.All()[0];
  call->OnReadDone(false);
  call->OnCancel();
  EXPECT_EQ(stream->Finish().error_code(), StatusCode::CANCELLED);
}

TEST(RequestCallTest, AnEarlyHalfCloseIsAnInvalidRequest) {
  Edge edge;
  grpc::ClientContext context;
  const auto stream = edge.stub->Forward(&context);
  stream->WritesDone();
  EXPECT_EQ(stream->Finish().error_code(), StatusCode::INVALID_ARGUMENT);
}

TEST(RequestCallTest, AMissingHeaderEndsTheCall) {
  Limits limits;
  limits.header_timeout = absl::Milliseconds(50);
  Edge edge(limits);
  grpc::ClientContext context;
  const auto stream = edge.stub->Forward(&context);
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), StatusCode::DEADLINE_EXCEEDED);
  EXPECT_NE(status.error_details().find("HEADER_TIMEOUT"), std::string::npos);
}

TEST(RequestCallTest, TheOldestCallWithoutAHeaderIsEvicted) {
  Limits limits;
  limits.max_streams_without_header = 3;
  Edge edge(limits);
  std::array<grpc::ClientContext, 4> contexts;
  std::vector<std::unique_ptr<grpc::ClientReaderWriter<v1::ForwardRequest, v1::ForwardResponse>>>
      streams;
  for (size_t i = 0; i < 4; ++i) {
    streams.push_back(edge.stub->Forward(&contexts[i]));
    if (i == 3) break;
    ASSERT_TRUE(WaitUntil([&] { return edge.registry.All().size() == i + 1; }));
  }
  const grpc::Status status = streams[0]->Finish();
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_NE(status.error_details().find("TOO_MANY_WITHOUT_HEADER"), std::string::npos);
  EXPECT_NE(status.error_details().find("RetryInfo"), std::string::npos);
  ASSERT_TRUE(WaitUntil([&] { return edge.registry.All().size() == 3; }));
  for (size_t i = 1; i < 4; ++i) {
    contexts[i].TryCancel();
    EXPECT_EQ(streams[i]->Finish().error_code(), StatusCode::CANCELLED);
  }
}

TEST(RequestCallTest, AConnectionHasALimitOfCalls) {
  Limits limits;
  limits.max_streams_per_connection = 2;
  Edge edge(limits);
  grpc::ClientContext first, second, third, other;
  const auto one = edge.stub->Forward(&first);
  const auto two = edge.stub->Forward(&second);
  ASSERT_TRUE(WaitUntil([&] { return edge.registry.All().size() == 2; }));
  const grpc::Status status = edge.stub->Forward(&third)->Finish();
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_NE(status.error_details().find("TOO_MANY_STREAMS"), std::string::npos);
  EXPECT_NE(status.error_details().find("RetryInfo"), std::string::npos);
  const auto stub = edge.NewStub();
  const auto elsewhere = stub->Forward(&other);
  EXPECT_TRUE(WaitUntil([&] { return edge.registry.All().size() == 3; }));
  for (grpc::ClientContext* context : {&first, &second, &other}) context->TryCancel();
  for (const auto* stream : {&one, &two, &elsewhere}) {
    EXPECT_EQ((*stream)->Finish().error_code(), StatusCode::CANCELLED);
  }
}

}  // namespace
}  // namespace ringattn::server
