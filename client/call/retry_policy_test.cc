#include "client/call/retry_policy.h"

#include "client/testing/fake_attention_server.h"
#include "client/transfer/grpc_status.h"
#include "gtest/gtest.h"

namespace ringattn::client {
namespace {

FailedAttempt Failed(const FakeError& error, int replays = 0) {
  return {.status = FromGrpcStatus(error.ToStatus()),
          .replays_so_far = replays,
          .server_ever_answered = true,
          .elapsed = absl::Seconds(1),
          .time_left = absl::InfiniteDuration()};
}

TEST(RetryPolicy, OnlyTransientFailuresAreReplayed) {
  const RetryOptions options;
  using Code = grpc::StatusCode;
  EXPECT_TRUE(ReplayDelay(options, Failed({.code = Code::UNAVAILABLE}), 0).has_value());
  EXPECT_TRUE(ReplayDelay(options, Failed({.code = Code::ABORTED}), 0).has_value());
  EXPECT_TRUE(
      ReplayDelay(options, Failed({.code = Code::RESOURCE_EXHAUSTED, .retry_after_ms = 0}), 0)
          .has_value());
  EXPECT_FALSE(ReplayDelay(options, Failed({.code = Code::RESOURCE_EXHAUSTED}), 0).has_value());
  EXPECT_FALSE(
      ReplayDelay(options, Failed({.code = Code::ABORTED, .reason = "SUPERSEDED"}), 0).has_value());
  for (const Code code : {Code::INVALID_ARGUMENT, Code::FAILED_PRECONDITION, Code::INTERNAL,
                          Code::CANCELLED, Code::DEADLINE_EXCEEDED, Code::UNIMPLEMENTED}) {
    EXPECT_FALSE(ReplayDelay(options, Failed({.code = code, .retry_after_ms = 1}), 0).has_value());
  }
}

// A retry would end alike, unlike one at a server that is not running yet.
TEST(RetryPolicy, AFailedTlsHandshakeIsFinal) {
  const auto may = [](const std::string& message) {
    FailedAttempt failed = Failed({.code = grpc::StatusCode::UNAVAILABLE});
    failed.status = FromGrpcStatus(grpc::Status(grpc::StatusCode::UNAVAILABLE, message));
    return ReplayDelay({}, failed, 0).has_value();
  };
  EXPECT_TRUE(may("failed to connect to all addresses; last error: ... Connection refused"));
  EXPECT_TRUE(may("failed to connect to all addresses; last error: ... Socket closed"));
  EXPECT_FALSE(may("... Tls handshake failed: ... certificate verify failed"));
  EXPECT_FALSE(may("... Tls handshake failed: ... wrong version number"));
  EXPECT_FALSE(may("... UNAUTHENTICATED: Hostname Verification Check failed."));
}

TEST(RetryPolicy, BackoffDoublesUpToItsBound) {
  const RetryOptions options;
  const FakeError lost{.code = grpc::StatusCode::ABORTED};
  EXPECT_EQ(*ReplayDelay(options, Failed(lost, 0), 0), absl::Milliseconds(200));
  EXPECT_EQ(*ReplayDelay(options, Failed(lost, 2), 0), absl::Milliseconds(800));
  EXPECT_EQ(*ReplayDelay(options, Failed(lost, 2), 1), absl::Milliseconds(400));
  EXPECT_EQ(*ReplayDelay(options, Failed(lost, 9), 0), absl::Seconds(5));
  EXPECT_FALSE(ReplayDelay(options, Failed(lost, 10), 0).has_value());
}

TEST(RetryPolicy, RetryInfoIsALowerBound) {
  const FakeError busy{.code = grpc::StatusCode::RESOURCE_EXHAUSTED, .retry_after_ms = 700};
  EXPECT_EQ(*ReplayDelay({}, Failed(busy, 0), 1), absl::Milliseconds(700));
}

TEST(RetryPolicy, ADelayBeyondTheDeadlineIsFinal) {
  FailedAttempt failed = Failed({.code = grpc::StatusCode::UNAVAILABLE});
  failed.time_left = absl::Milliseconds(150);
  EXPECT_FALSE(ReplayDelay({}, failed, 0).has_value());
}

TEST(RetryPolicy, AServerThatNeverAnsweredIsGivenLessTime) {
  FailedAttempt failed = Failed({.code = grpc::StatusCode::UNAVAILABLE}, 3);
  failed.server_ever_answered = false;
  EXPECT_TRUE(ReplayDelay({}, failed, 0).has_value());
  failed.elapsed = absl::Seconds(6);
  EXPECT_FALSE(ReplayDelay({}, failed, 0).has_value());
}

}  // namespace
}  // namespace ringattn::client
