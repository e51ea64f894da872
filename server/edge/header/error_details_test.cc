#include "server/edge/header/error_details.h"

#include <string>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

google::rpc::Status Details(const grpc::Status& status) {
  google::rpc::Status details;
  EXPECT_TRUE(details.ParseFromString(status.error_details()));
  EXPECT_EQ(details.code(), static_cast<int>(status.error_code()));
  EXPECT_EQ(details.message(), status.error_message());
  return details;
}

template <typename Message>
Message Find(const google::rpc::Status& status) {
  Message message;
  for (const auto& detail : status.details()) {
    if (detail.UnpackTo(&message)) return message;
  }
  ADD_FAILURE() << "no " << Message::descriptor()->full_name();
  return message;
}

TEST(ErrorDetailsTest, AFailureCarriesItsDetails) {
  Failure failure;
  failure.code = absl::StatusCode::kAborted;
  failure.message = "rank 2 (worker-2) was lost";
  failure.reason = "WORKER_LOST";
  failure.retry_after = absl::Milliseconds(1500);
  failure.field = "request_id";
  const grpc::Status status = ToGrpcStatus(failure, Limits());
  EXPECT_EQ(status.error_code(), grpc::StatusCode::ABORTED);
  const google::rpc::Status details = Details(status);
  EXPECT_EQ(Find<google::rpc::ErrorInfo>(details).reason(), "WORKER_LOST");
  EXPECT_EQ(Find<google::rpc::ErrorInfo>(details).domain(), "ringattn");
  const auto delay = Find<google::rpc::RetryInfo>(details).retry_delay();
  EXPECT_EQ(delay.seconds(), 1);
  EXPECT_EQ(delay.nanos(), 500'000'000);
  EXPECT_EQ(Find<google::rpc::BadRequest>(details).field_violations(0).field(), "request_id");
}

TEST(ErrorDetailsTest, AQuotaIsNamedWithItsSubject) {
  Failure failure;
  failure.code = absl::StatusCode::kResourceExhausted;
  failure.message = "this client has 4 requests in flight";
  failure.quota = {"client:trainer", "max_requests_in_flight: 4"};
  const auto violation =
      Find<google::rpc::QuotaFailure>(Details(ToGrpcStatus(failure, Limits()))).violations(0);
  EXPECT_EQ(violation.subject(), "client:trainer");
  EXPECT_EQ(violation.description(), "max_requests_in_flight: 4");
}

// Otherwise clients would print "plan.world_size: plan.world_size: ...".
TEST(ErrorDetailsTest, AViolationDoesNotNameItsFieldTwice) {
  Failure failure;
  failure.code = absl::StatusCode::kFailedPrecondition;
  failure.message = "plan.world_size: is 4, but only 1 worker is ready";
  failure.field = "plan.world_size";
  const google::rpc::Status details = Details(ToGrpcStatus(failure, Limits()));
  EXPECT_EQ(details.message(), failure.message);
  const auto violation = Find<google::rpc::BadRequest>(details).field_violations(0);
  EXPECT_EQ(violation.field(), "plan.world_size");
  EXPECT_EQ(violation.description(), "is 4, but only 1 worker is ready");
}

TEST(ErrorDetailsTest, AFailureCarriesNoOtherDetails) {
  Failure failure;
  failure.code = absl::StatusCode::kCancelled;
  failure.message = "cancelled";
  EXPECT_EQ(Details(ToGrpcStatus(failure, Limits())).details_size(), 0);
}

TEST(ErrorDetailsTest, ManyAndLongViolationsStayWithinTheBound) {
  const Limits limits;
  for (size_t length : {10u, 300u, 5000u}) {
    Rejection rejection;
    for (int i = 0; i < 500; ++i) {
      rejection.violations.push_back({std::string(length, 'f'), std::string(length, 'd')});
    }
    const grpc::Status status = ToGrpcStatus(rejection, limits);
    EXPECT_LE(static_cast<int64_t>(status.error_details().size() + status.error_message().size()),
              limits.max_error_detail_bytes);
    EXPECT_GE(Find<google::rpc::BadRequest>(Details(status)).field_violations_size(), 1);
  }
}

TEST(ErrorDetailsTest, EchoedDataIsPrintable) {
  Rejection rejection;
  rejection.violations = {{"field\n", std::string("a\0b\xff\x7f\r\n", 7)}};
  const grpc::Status status = ToGrpcStatus(rejection, Limits());
  for (char c : status.error_message()) EXPECT_TRUE(c >= 0x20 && c < 0x7f);
  EXPECT_EQ(Find<google::rpc::BadRequest>(Details(status)).field_violations(0).description(),
            "a?b????");
}

TEST(ErrorDetailsTest, CodesDependOnWhoMustAct) {
  Rejection rejection;
  rejection.violations = {{"options.dropout.rate", "is 2"}};
  EXPECT_EQ(Find<google::rpc::ErrorInfo>(Details(ToGrpcStatus(rejection, Limits()))).reason(),
            "INVALID_REQUEST");
  rejection.code = absl::StatusCode::kResourceExhausted;
  EXPECT_EQ(Find<google::rpc::ErrorInfo>(Details(ToGrpcStatus(rejection, Limits()))).reason(),
            "OVER_LIMIT");
}

TEST(ErrorDetailsTest, CodesHaveTheirNames) {
  EXPECT_STREQ(CodeName(grpc::StatusCode::OK), "OK");
  EXPECT_STREQ(CodeName(grpc::StatusCode::UNAUTHENTICATED), "UNAUTHENTICATED");
  EXPECT_STREQ(CodeName(99), "UNKNOWN");
}

}  // namespace
}  // namespace ringattn::server
