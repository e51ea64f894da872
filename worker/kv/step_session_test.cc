#include "worker/kv/step_session.h"

#include <cstring>

#include "absl/synchronization/notification.h"
#include "common/kv/kv_error.h"
#include "gtest/gtest.h"
#include "worker/device/cpu/cpu_device.h"
#include "worker/kv/kv_test_cache.h"

namespace ringattn::worker {
namespace {

class NoStream : public KvStream {
 public:
  void End(const absl::Status&) override {}
};

class StepSessionTest : public ::testing::Test {
 protected:
  StepSessionTest()
      : device_(1, 0),
        budget_(1 << 20),
        store_({.max_bytes = 1 << 20, .tick_interval = absl::ZeroDuration()}, &device_, &budget_,
               [this](const v1::JoinRequest& message) {
                 if (message.has_kv_reserved()) reserved_.Notify();
               }),
        session_(&store_, /*with_token=*/true, &hooks_),
        stream_(std::make_shared<NoStream>()) {
    store_.Reserve(TestReserve("a"));
    reserved_.WaitForNotification();
    store_.Open(TestOpen("a", 1));
    store_.Settle(TestSettle("a", 1, 0));
    v1::StepRequest hello;
    hello.mutable_hello()->set_cache_id("a");
    hello.mutable_hello()->set_epoch(1);
    hello.mutable_hello()->set_token(kTestToken);
    EXPECT_TRUE(Execute(hello).ok());
    EXPECT_EQ(response_.opened().next_step(), 1u);
  }

  absl::Status Execute(const v1::StepRequest& request) {
    response_.Clear();
    absl::Status status;
    store_.engine()->Run([&](StepKernels* kernels) {
      status = session_.Execute(request, stream_, kernels, &response_);
    });
    return status;
  }
  absl::Status Begin(const v1::StepBegin& begin) {
    v1::StepRequest request;
    *request.mutable_begin() = begin;
    return Execute(request);
  }
  absl::Status Call(const v1::LayerCall& call) {
    v1::StepRequest request;
    *request.mutable_call() = call;
    return Execute(request);
  }
  bool is_unanswered() const {
    return response_.message_case() == v1::StepResponse::MESSAGE_NOT_SET;
  }

  CpuDevice device_;
  MemoryBudget budget_;
  absl::Notification reserved_;
  KvStore store_;
  StepHooks hooks_;
  StepSession session_;
  std::shared_ptr<NoStream> stream_;
  v1::StepResponse response_;
};

TEST_F(StepSessionTest, CallsOfARefusedStepAreSkipped) {
  ASSERT_TRUE(Begin(TestBegin(1, 5)).ok());
  ASSERT_TRUE(response_.has_refused());
  for (uint32_t layer : {0, 1, 9}) {  // whatever they contain
    ASSERT_TRUE(Call(TestCall(1, layer, 0)).ok());
    EXPECT_TRUE(is_unanswered());
  }
  // The number is free. Calls of the accepted step are answered.
  ASSERT_TRUE(Begin(TestBegin(1, 0)).ok());
  ASSERT_TRUE(response_.has_accepted());
  ASSERT_TRUE(Call(TestCall(1, 0, 4)).ok());
  float value;
  ASSERT_EQ(response_.result().out().size(), 4 * sizeof(value));
  std::memcpy(&value, response_.result().out().data(), sizeof(value));
  EXPECT_FLOAT_EQ(value, 4);
}

TEST_F(StepSessionTest, CallsOfOtherStepsAreOutOfOrderAfterARefusal) {
  ASSERT_TRUE(Begin(TestBegin(1, 5)).ok());
  ASSERT_TRUE(response_.has_refused());
  const absl::Status status = Call(TestCall(2, 0, 0));
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(KvErrorReason(status), "STEP_ORDER");
}

TEST_F(StepSessionTest, CallsWithoutARefusalAreOutOfOrder) {
  EXPECT_EQ(KvErrorReason(Call(TestCall(1, 0, 0))), "STEP_ORDER");
}

TEST_F(StepSessionTest, ARefusalCommitsTheStepBeforeAndItsCallsEnd) {
  ASSERT_TRUE(Begin(TestBegin(1, 0)).ok());
  for (uint32_t layer : {0, 1}) ASSERT_TRUE(Call(TestCall(1, layer, 1)).ok());
  ASSERT_TRUE(Begin(TestBegin(2, 7)).ok());
  ASSERT_TRUE(response_.has_refused());
  EXPECT_EQ(KvErrorReason(Call(TestCall(1, 0, 1))), "STEP_ORDER");
  ASSERT_TRUE(Call(TestCall(2, 0, 1)).ok());
  EXPECT_TRUE(is_unanswered());
}

TEST_F(StepSessionTest, ALeavingWorkerIsReported) {
  ASSERT_TRUE(Begin(TestBegin(1, 0)).ok());
  EXPECT_FALSE(response_.accepted().leaving());
  store_.SetLeaving();
  ASSERT_TRUE(Begin(TestBegin(1, 0)).ok());
  EXPECT_TRUE(response_.accepted().leaving());
  ASSERT_TRUE(Call(TestCall(1, 0, 1)).ok());
}

}  // namespace
}  // namespace ringattn::worker
