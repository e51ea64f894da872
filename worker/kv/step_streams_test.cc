#include "worker/kv/step_streams.h"

#include <atomic>
#include <deque>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/kv/step_metadata.h"
#include "common/security/credentials.h"
#include "common/security/secret.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "gtest/gtest.h"
#include "worker/device/cpu/cpu_device.h"
#include "worker/kv/kv_test_cache.h"

namespace ringattn::worker {
namespace {

std::string ReasonOf(const grpc::Status& status) {
  google::rpc::Status details;
  google::rpc::ErrorInfo info;
  if (!details.ParseFromString(status.error_details()) || details.details().empty()) return "";
  return details.details(0).UnpackTo(&info) ? info.reason() : "";
}

// One call of Steps.
class Writer {
 public:
  // With `secret`, as the coordinator's relay; else as a client.
  explicit Writer(v1::KvShardService::Stub* stub, const std::string& secret = "",
                  const std::string& token = kTestToken, const std::string& id = "a")
      : token_(token), id_(id) {
    if (secret.empty()) {
      context_.AddMetadata(kStepHelloMetadataKey, HelloOf(1).SerializeAsString());
    } else {
      context_.AddMetadata(kSecretMetadataKey, secret);
    }
    context_.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    stream_ = stub->Steps(&context_);
  }

  bool Hello(uint64_t epoch) {
    v1::StepRequest request;
    *request.mutable_hello() = HelloOf(epoch);
    return Ask(request) && response.has_opened();
  }
  bool Begin(const v1::StepBegin& begin) {
    v1::StepRequest request;
    *request.mutable_begin() = begin;
    return Ask(request);
  }
  bool Call(const v1::LayerCall& call) {
    v1::StepRequest request;
    *request.mutable_call() = call;
    return Ask(request);
  }
  bool Ask(const v1::StepRequest& request) { return stream_->Write(request) && Read(); }
  bool Write(const v1::StepRequest& request) { return stream_->Write(request); }
  bool Read() { return stream_->Read(&response); }
  grpc::Status Finish() {
    stream_->WritesDone();
    while (Read()) {
    }
    return stream_->Finish();
  }
  void Cancel() { context_.TryCancel(); }

  v1::StepResponse response;

 private:
  v1::StepHello HelloOf(uint64_t epoch) const {
    v1::StepHello hello;
    hello.set_cache_id(id_);
    hello.set_epoch(epoch);
    hello.set_token(token_);
    return hello;
  }

  const std::string token_, id_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::StepRequest, v1::StepResponse>> stream_;
};

class StepStreamsTest : public ::testing::Test {
 protected:
  StepStreamsTest()
      : device_(1, 0),
        budget_(1 << 20),
        store_({.max_bytes = 1 << 20, .tick_interval = absl::ZeroDuration()}, &device_, &budget_,
               [this](v1::JoinRequest message) {
                 absl::MutexLock lock(&mutex_);
                 sent_.push_back(std::move(message));
               }),
        service_(&store_, "",
                 {.on_step = [this] { ++steps_; },
                  .on_call = [this](absl::Duration) { ++calls_; },
                  .on_refused =
                      [this](const std::string& reason) {
                        absl::MutexLock lock(&mutex_);
                        refused_.push_back(reason);
                      }}) {
    server_ = Serve(&service_, &stub_);
    store_.Reserve(TestReserve("a"));
    EXPECT_TRUE(Next().kv_reserved().ok());
    Open(1, 0);
  }

  static std::unique_ptr<grpc::Server> Serve(grpc::Service* service,
                                             std::unique_ptr<v1::KvShardService::Stub>* stub) {
    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", TransportSecurity().ServerCredentials(), &port);
    builder.RegisterService(service);
    auto server = builder.BuildAndStart();
    *stub = v1::KvShardService::NewStub(grpc::CreateChannel(
        absl::StrCat("127.0.0.1:", port), TransportSecurity().ChannelCredentials()));
    return server;
  }

  v1::JoinRequest Next() {
    const auto any = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !sent_.empty(); };
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&any));
    v1::JoinRequest message = std::move(sent_.front());
    sent_.pop_front();
    return message;
  }
  void Open(uint64_t epoch, uint64_t step, const std::string& id = "a") {
    store_.Open(TestOpen(id, epoch));
    Next();
    store_.Settle(TestSettle(id, epoch, step));
    EXPECT_TRUE(Next().kv_settled().ok());
  }

  static float Out(const Writer& writer) {
    float value;
    std::memcpy(&value, writer.response.result().out().data(), sizeof(value));
    return value;
  }

  CpuDevice device_;
  MemoryBudget budget_;
  absl::Mutex mutex_;
  std::deque<v1::JoinRequest> sent_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> refused_ ABSL_GUARDED_BY(mutex_);
  std::atomic<int> steps_{0}, calls_{0};
  KvStore store_;
  KvShardServiceImpl service_;
  std::unique_ptr<v1::KvShardService::Stub> stub_;
  std::unique_ptr<grpc::Server> server_;
};

TEST_F(StepStreamsTest, StepsAreAnswered) {
  Writer writer(stub_.get());
  ASSERT_TRUE(writer.Hello(1));
  EXPECT_EQ(writer.response.opened().next_step(), 1u);
  for (uint64_t step = 1; step <= 20; ++step) {
    ASSERT_TRUE(writer.Begin(TestBegin(step, step - 1)));
    ASSERT_TRUE(writer.response.has_accepted());
    for (uint32_t layer = 0; layer < 2; ++layer) {
      ASSERT_TRUE(writer.Call(TestCall(step, layer, 3)));
      EXPECT_FLOAT_EQ(Out(writer), 3);
    }
  }
  v1::StepRequest commit;
  commit.mutable_commit()->set_step(20);
  ASSERT_TRUE(writer.Ask(commit));
  EXPECT_EQ(writer.response.committed().step(), 20u);
  EXPECT_TRUE(writer.Finish().ok());
  EXPECT_EQ(steps_, 20);
  EXPECT_EQ(calls_, 40);
  Writer again(stub_.get());
  ASSERT_TRUE(again.Hello(1));
  EXPECT_EQ(again.response.opened().next_step(), 21u);
  ASSERT_EQ(again.response.opened().sequences_size(), 1);
  EXPECT_EQ(again.response.opened().sequences(0).length(), 20u);
}

TEST_F(StepStreamsTest, ManyMessagesMayBeOnTheirWay) {
  Writer writer(stub_.get());
  ASSERT_TRUE(writer.Hello(1));
  std::thread sender([&] {
    for (uint64_t step = 1; step <= 50; ++step) {
      v1::StepRequest request;
      *request.mutable_begin() = TestBegin(step, step - 1);
      writer.Write(request);
      for (uint32_t layer = 0; layer < 2; ++layer) {
        *request.mutable_call() = TestCall(step, layer, static_cast<float>(layer));
        writer.Write(request);
      }
    }
  });
  for (int i = 0; i < 150; ++i) {
    ASSERT_TRUE(writer.Read());
    EXPECT_EQ(writer.response.has_accepted(), i % 3 == 0);
  }
  sender.join();
  EXPECT_TRUE(writer.Finish().ok());
}

TEST_F(StepStreamsTest, ARefusedStepLeavesTheStreamOpen) {
  Writer writer(stub_.get());
  ASSERT_TRUE(writer.Hello(1));
  ASSERT_TRUE(writer.Begin(TestBegin(1, 5)));
  ASSERT_TRUE(writer.response.has_refused());
  ASSERT_TRUE(writer.Begin(TestBegin(1, 0)));
  EXPECT_TRUE(writer.response.has_accepted());
  absl::MutexLock lock(&mutex_);
  EXPECT_EQ(refused_, std::vector<std::string>{"UNKNOWN_SEQUENCE"});
}

TEST_F(StepStreamsTest, TheCallAfterARefusedStepIsSkipped) {
  Writer writer(stub_.get());
  ASSERT_TRUE(writer.Hello(1));
  v1::StepRequest begin, call;
  *begin.mutable_begin() = TestBegin(1, 5);
  *call.mutable_call() = TestCall(1, 0, 1);
  for (int i = 0; i < 3; ++i) {  // more messages than slots
    ASSERT_TRUE(writer.Write(begin));
    ASSERT_TRUE(writer.Write(call));
  }
  *begin.mutable_begin() = TestBegin(1, 0);
  ASSERT_TRUE(writer.Write(begin));
  ASSERT_TRUE(writer.Write(call));
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(writer.Read());
    EXPECT_TRUE(writer.response.has_refused());
  }
  ASSERT_TRUE(writer.Read());
  EXPECT_TRUE(writer.response.has_accepted());
  ASSERT_TRUE(writer.Read());
  EXPECT_FLOAT_EQ(Out(writer), 1);
  EXPECT_TRUE(writer.Finish().ok());
}

TEST_F(StepStreamsTest, ASkippedCallMayBeTheLastMessage) {
  Writer writer(stub_.get());
  ASSERT_TRUE(writer.Hello(1));
  ASSERT_TRUE(writer.Begin(TestBegin(1, 5)));
  ASSERT_TRUE(writer.response.has_refused());
  v1::StepRequest call;
  *call.mutable_call() = TestCall(1, 0, 1);
  ASSERT_TRUE(writer.Write(call));
  EXPECT_TRUE(writer.Finish().ok());
}

// A read that ends on one thread must not pass the post of an earlier read on another thread.
TEST_F(StepStreamsTest, RequestsAreExecutedInTheOrderOfTheirArrival) {
  constexpr int kSteps = 1000;
  for (const char* id : {"b", "c", "d"}) {
    store_.Reserve(TestReserve(id));
    EXPECT_TRUE(Next().kv_reserved().ok());
    Open(1, 0, id);
  }
  std::vector<std::thread> writers;
  for (const std::string id : {"a", "b", "c", "d"}) {
    writers.emplace_back([this, id] {
      Writer writer(stub_.get(), "", kTestToken, id);
      ASSERT_TRUE(writer.Hello(1));
      std::thread sender([&] {
        v1::StepRequest begin, commit;
        for (uint64_t step = 1; step <= kSteps; ++step) {  // empty steps
          begin.mutable_begin()->set_step(step);
          commit.mutable_commit()->set_step(step);
          if (!writer.Write(begin) || !writer.Write(commit)) return;
        }
      });
      int answers = 0;
      while (answers < 2 * kSteps && writer.Read()) ++answers;
      sender.join();
      const grpc::Status status = writer.Finish();
      EXPECT_TRUE(status.ok()) << status.error_message();
      EXPECT_EQ(answers, 2 * kSteps);
    });
  }
  for (std::thread& writer : writers) writer.join();
}

TEST_F(StepStreamsTest, ErrorsEndTheStreamWithTheirReasonAfterEarlierAnswers) {
  {
    Writer writer(stub_.get());
    ASSERT_TRUE(writer.Hello(1));
    v1::StepRequest request;
    *request.mutable_begin() = TestBegin(1, 0);
    ASSERT_TRUE(writer.Write(request));
    *request.mutable_begin() = TestBegin(1, 0, 2);
    ASSERT_TRUE(writer.Write(request));
    ASSERT_TRUE(writer.Read());
    EXPECT_TRUE(writer.response.has_accepted());
    const grpc::Status status = writer.Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
    EXPECT_EQ(ReasonOf(status), "STEP_CONFLICT");
  }
  {
    // The cache goes on.
    Writer writer(stub_.get());
    ASSERT_TRUE(writer.Hello(1));
    ASSERT_TRUE(writer.Begin(TestBegin(1, 0)));
    EXPECT_FALSE(writer.Call(TestCall(1, 9, 0)));
    EXPECT_EQ(ReasonOf(writer.Finish()), "BAD_CALL");
  }
  {
    Writer writer(stub_.get());
    ASSERT_FALSE(writer.Begin(TestBegin(1, 0)));
    EXPECT_EQ(writer.Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  }
  {
    Writer writer(stub_.get());
    ASSERT_FALSE(writer.Ask({}));
    EXPECT_EQ(writer.Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  }
  {
    Writer writer(stub_.get(), "", "another token");
    ASSERT_FALSE(writer.Hello(1));
    EXPECT_EQ(writer.Finish().error_code(), grpc::StatusCode::UNAUTHENTICATED);
  }
}

TEST_F(StepStreamsTest, ANewWriterEndsTheOldStreamAndItsStepIsUndone) {
  Writer old(stub_.get());
  ASSERT_TRUE(old.Hello(1));
  ASSERT_TRUE(old.Begin(TestBegin(1, 0)));
  ASSERT_TRUE(old.Call(TestCall(1, 0, 1)));
  Open(2, 0);
  const grpc::Status status = old.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::ABORTED);
  EXPECT_EQ(ReasonOf(status), "KV_FENCED");
  Writer next(stub_.get());
  ASSERT_TRUE(next.Hello(2));
  EXPECT_EQ(next.response.opened().next_step(), 1u);
  EXPECT_EQ(next.response.opened().sequences_size(), 0);
}

TEST_F(StepStreamsTest, AFreedCacheEndsItsStream) {
  Writer writer(stub_.get());
  ASSERT_TRUE(writer.Hello(1));
  v1::KvFree free;
  free.add_cache_ids("a");
  free.set_reason("KV_EXPIRED");
  store_.Free(free);
  const grpc::Status status = writer.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(ReasonOf(status), "KV_EXPIRED");
  EXPECT_EQ(budget_.taken_bytes(), 0);
}

TEST_F(StepStreamsTest, CancelledStreamsLeaveNothingBehind) {
  for (int i = 0; i < 20; ++i) {
    Writer writer(stub_.get());
    ASSERT_TRUE(writer.Hello(1));
    writer.Cancel();
    EXPECT_EQ(writer.Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  Writer writer(stub_.get());
  ASSERT_TRUE(writer.Hello(1));
  EXPECT_TRUE(writer.Finish().ok());
}

TEST_F(StepStreamsTest, TokensAreCheckedBeforeAMessageIsRead) {
  {
    Writer writer(stub_.get(), "", "another token");  // sends nothing
    EXPECT_FALSE(writer.Read());
    EXPECT_EQ(writer.Finish().error_code(), grpc::StatusCode::UNAUTHENTICATED);
  }
  {
    Writer writer(stub_.get(), "", kTestToken, "no such cache");
    EXPECT_FALSE(writer.Read());
    EXPECT_EQ(writer.Finish().error_code(), grpc::StatusCode::UNAUTHENTICATED);
  }
  for (const std::vector<std::string>& entries : {std::vector<std::string>{}, {"\xff"}, {"", ""}}) {
    grpc::ClientContext context;
    for (const std::string& entry : entries) context.AddMetadata(kStepHelloMetadataKey, entry);
    const auto stream = stub_->Steps(&context);
    v1::StepResponse response;
    EXPECT_FALSE(stream->Read(&response));
    const grpc::Status status = stream->Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAUTHENTICATED);
    EXPECT_NE(status.error_message().find(kStepHelloMetadataKey), std::string::npos);
  }
  absl::MutexLock lock(&mutex_);
  EXPECT_EQ(refused_, std::vector<std::string>(5));
}

TEST_F(StepStreamsTest, TheRelayShowsTheSecretInsteadOfAToken) {
  KvShardServiceImpl relay(&store_, "the secret of the cluster", {});
  std::unique_ptr<v1::KvShardService::Stub> stub;
  const auto server = Serve(&relay, &stub);
  Writer without(stub.get());  // a client's token does not replace it
  EXPECT_FALSE(without.Hello(1));
  EXPECT_EQ(without.Finish().error_code(), grpc::StatusCode::UNAUTHENTICATED);
  Writer with(stub.get(), "the secret of the cluster", /*token=*/"");
  EXPECT_TRUE(with.Hello(1));
  EXPECT_TRUE(with.Finish().ok());
}

}  // namespace
}  // namespace ringattn::worker
