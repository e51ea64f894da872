// Prepared calls: what Prepare sends, and how long it is renewed.
// Tests: preparations.cc, client/api/prepared_call.h
#include <optional>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "client/api/client.h"
#include "client/testing/fake_attention_server.h"
#include "common/wire/durations.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::client {
namespace {

using ::testing::HasSubstr;

ForwardArgs Args() {
  ForwardArgs args;
  args.shape.set_batch(1);
  args.shape.set_seq_len_q(1000);
  args.shape.set_seq_len_kv(1000);
  args.shape.set_num_heads(2);
  args.shape.set_head_dim(32);
  args.dtype = v1::DATA_TYPE_FLOAT32;
  args.options.set_causal(true);
  return args;
}

// Answers every header as a service that prepares it for `ttl`, unless an error is set.
class PreparingServer {
 public:
  explicit PreparingServer(absl::Duration ttl)
      : server_([this, ttl](int, const v1::ForwardHeader& header, grpc::ServerContext*,
                            auto* stream) { return Answer(header, ttl, stream); }) {}

  std::vector<v1::ForwardHeader> headers() const {
    absl::MutexLock lock(&mutex_);
    return headers_;
  }
  void AwaitHeaders(size_t count) const {
    const auto have = [this, count]()
                          ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return headers_.size() >= count; };
    absl::MutexLock lock(&mutex_);
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&have), absl::Seconds(20)));
  }
  void SetError(std::optional<FakeError> error) {
    absl::MutexLock lock(&mutex_);
    error_ = std::move(error);
  }
  const std::string& address() const { return server_.address(); }

 private:
  template <typename Stream>
  grpc::Status Answer(const v1::ForwardHeader& header, absl::Duration ttl, Stream* stream) {
    {
      absl::MutexLock lock(&mutex_);
      headers_.push_back(header);
      if (error_) return error_->ToStatus();
    }
    v1::ForwardResponse response;
    v1::SingleReply* single = response.mutable_single();
    single->mutable_accepted()->mutable_plan()->add_members("a");
    v1::PreparedReport* prepared = single->mutable_summary()->mutable_prepared();
    if (ttl > absl::ZeroDuration()) ringattn::SetDuration(ttl, prepared->mutable_ttl());
    prepared->set_bytes(7);
    stream->Write(response);
    return grpc::Status::OK;
  }

  mutable absl::Mutex mutex_;
  std::vector<v1::ForwardHeader> headers_ ABSL_GUARDED_BY(mutex_);
  std::optional<FakeError> error_ ABSL_GUARDED_BY(mutex_);
  FakeAttentionServer server_;  // last: it calls Answer
};

TEST(PreparedCall, SendsOnlyAHeader) {
  PreparingServer server(absl::Minutes(1));
  const auto client = *Client::Connect(server.address());
  const auto prepared = client->Prepare(Args(), {.ttl = absl::Seconds(40)});
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  EXPECT_EQ(prepared->report().summary.prepared().bytes(), 7u);
  EXPECT_EQ(prepared->report().accepted.plan().members(0), "a");
  EXPECT_TRUE(prepared->trouble().ok());
  const v1::ForwardHeader header = server.headers().at(0);
  EXPECT_EQ(header.prepare().ttl().seconds(), 40);
  EXPECT_TRUE(header.options().causal());
  EXPECT_EQ(header.shape().seq_len_q(), 1000u);
  EXPECT_FALSE(header.has_transport());
  EXPECT_EQ(header.inline_tensors_size(), 0);
}

TEST(PreparedCall, IsRenewedWhileAHandleExists) {
  PreparingServer server(absl::Milliseconds(60));
  const auto client = *Client::Connect(server.address());
  auto prepared = client->Prepare(Args());
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  std::optional<PreparedCall> copy = *prepared;
  prepared = absl::CancelledError("dropped");
  server.AwaitHeaders(4);
  for (const v1::ForwardHeader& header : server.headers()) EXPECT_TRUE(header.has_prepare());
  copy.reset();
  absl::SleepFor(absl::Milliseconds(100));  // for a renewal that has begun
  const size_t sent = server.headers().size();
  absl::SleepFor(absl::Milliseconds(200));
  EXPECT_EQ(server.headers().size(), sent);
}

TEST(PreparedCall, ReportsRenewalsThatFail) {
  PreparingServer server(absl::Milliseconds(60));
  const auto client = *Client::Connect(server.address());
  const auto prepared = client->Prepare(Args());
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  const auto await = [&](absl::StatusCode code) {
    const absl::Time patience = absl::Now() + absl::Seconds(20);
    while (prepared->trouble().code() != code && absl::Now() < patience) {
      absl::SleepFor(absl::Milliseconds(5));
    }
    EXPECT_EQ(prepared->trouble().code(), code);
  };
  server.SetError(FakeError{.code = grpc::StatusCode::FAILED_PRECONDITION, .message = "too large"});
  await(absl::StatusCode::kFailedPrecondition);
  server.SetError(std::nullopt);
  await(absl::StatusCode::kOk);
}

TEST(PreparedCall, OutlivesItsClient) {
  PreparingServer server(absl::Milliseconds(60));
  auto client = *Client::Connect(server.address());
  const auto prepared = client->Prepare(Args());
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  server.AwaitHeaders(2);
  client.reset();
  const size_t sent = server.headers().size();
  absl::SleepFor(absl::Milliseconds(100));
  EXPECT_EQ(server.headers().size(), sent);
  EXPECT_EQ(prepared->report().summary.prepared().bytes(), 7u);
}

TEST(PreparedCall, NeedsAServiceThatPrepares) {
  PreparingServer server(absl::ZeroDuration());
  const auto client = *Client::Connect(server.address());
  EXPECT_EQ(client->Prepare(Args()).status().code(), absl::StatusCode::kInternal);
  server.SetError(FakeError{.code = grpc::StatusCode::INVALID_ARGUMENT, .message = "field 10"});
  const absl::Status refused = client->Prepare(Args()).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr("field 10"));
}

}  // namespace
}  // namespace ringattn::client
