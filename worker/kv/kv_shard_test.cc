// Results are compared with the oracle in tests/sweep/kv_sweep_test.cc; here are the rules of
// calls.
#include "worker/kv/kv_shard.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "common/kv/kv_error.h"
#include "gtest/gtest.h"
#include "worker/device/cpu/cpu_device.h"
#include "worker/kv/kv_test_cache.h"

namespace ringattn::worker {
namespace {

class KvShardTest : public ::testing::Test {
 protected:
  KvShardTest() : device_(1, 0), kernels_(*device_.MakeStepKernels()) {
    auto spec = ParseKvCacheSpec(TestReserve("c").spec(), Limits());
    shard_ = *KvShard::Make(*std::move(spec), {1, 1}, 0, &device_);
    EXPECT_TRUE(shard_->Zero(never_));
    EXPECT_TRUE(shard_->log().Open(1).ok());
    EXPECT_TRUE(shard_->log().Settle(1, 0).ok());
  }

  absl::Status Begin(const v1::StepBegin& begin) {
    response_.Clear();
    return shard_->Begin(1, begin, &response_);
  }
  absl::Status Call(const v1::LayerCall& call) {
    result_.Clear();
    return shard_->Call(1, call, kernels_.get(), never_, &result_);
  }
  float Out(int i = 0) const {
    float value;
    std::memcpy(&value, result_.out().data() + i * sizeof(float), sizeof(float));
    return value;
  }
  void ExpectBad(const v1::LayerCall& call) {
    const absl::Status status = Call(call);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(KvErrorReason(status), "BAD_CALL") << status;
  }

  CpuDevice device_;
  std::unique_ptr<StepKernels> kernels_;
  std::atomic<bool> never_{false};
  std::unique_ptr<KvShard> shard_;
  v1::StepResponse response_;
  v1::LayerResult result_;
};

TEST_F(KvShardTest, AppendsAndAttends) {
  EXPECT_EQ(shard_->bytes(), 2 * 8 * 16 * (4 + 4) * 4);
  ASSERT_TRUE(Begin(TestBegin(1, 0)).ok());
  EXPECT_EQ(response_.accepted().blocks_free(), 7u);
  ASSERT_TRUE(Call(TestCall(1, 0, 2)).ok());
  EXPECT_FLOAT_EQ(Out(), 2);
  ASSERT_TRUE(Call(TestCall(1, 1, 4)).ok());
  EXPECT_FLOAT_EQ(Out(), 4);
  ASSERT_TRUE(Begin(TestBegin(2, 1)).ok());
  ASSERT_TRUE(Call(TestCall(2, 0, 4)).ok());
  EXPECT_FLOAT_EQ(Out(), 3);
  // The same message again writes the same place.
  ASSERT_TRUE(Call(TestCall(2, 0, 4)).ok());
  EXPECT_FLOAT_EQ(Out(), 3);
  ASSERT_TRUE(Call(TestCall(2, 1, 0)).ok());
  EXPECT_FLOAT_EQ(Out(), 2);
  EXPECT_GE(result_.device_time().nanos(), 0);
}

TEST_F(KvShardTest, BadCallsChangeNothing) {
  ASSERT_TRUE(Begin(TestBegin(1, 0)).ok());
  v1::LayerCall call = TestCall(1, 0, 1);
  call.set_layer(7);
  ExpectBad(call);
  call = TestCall(1, 0, 1);
  call.clear_k();
  ExpectBad(call);
  call.clear_v();
  ExpectBad(call);  // reads before the append
  call = TestCall(1, 0, 1);
  call.mutable_q()->push_back(0);
  ExpectBad(call);
  call = TestCall(1, 0, 1);
  call.set_output(static_cast<v1::KvOutput>(17));
  ExpectBad(call);
  call.set_output(v1::KV_OUTPUT_NONE);
  ExpectBad(call);  // the row has a query
  EXPECT_EQ(shard_->log().complete(), 0u);
  ASSERT_TRUE(Call(TestCall(1, 0, 5)).ok());
  EXPECT_FLOAT_EQ(Out(), 5);
}

TEST_F(KvShardTest, SeveralPositionPartsAnswerPartialsOnly) {
  auto spec = ParseKvCacheSpec(TestReserve("c").spec(), Limits());
  shard_ = *KvShard::Make(*std::move(spec), {1, 2}, 1, &device_);
  ASSERT_TRUE(shard_->Zero(never_));
  ASSERT_TRUE(shard_->log().Open(1).ok());
  ASSERT_TRUE(shard_->log().Settle(1, 0).ok());
  ASSERT_TRUE(Begin(TestBegin(1, 0)).ok());
  v1::LayerCall call = TestCall(1, 0, 1);
  call.clear_k();
  call.clear_v();
  ExpectBad(call);
  call.set_output(v1::KV_OUTPUT_PARTIAL);
  ASSERT_TRUE(Call(call).ok());  // entry 0 is on the other part
  EXPECT_EQ(Out(), 0);
  float lse;
  std::memcpy(&lse, result_.lse().data(), sizeof(lse));
  EXPECT_EQ(lse, -std::numeric_limits<float>::infinity());
}

TEST_F(KvShardTest, ANanOfOneSequenceStaysThere) {
  v1::StepBegin begin = TestBegin(1, 0, 3);
  begin.add_rows()->set_sequence(2);
  begin.mutable_rows(1)->set_append_tokens(2);
  begin.mutable_rows(1)->set_q_tokens(1);
  ASSERT_TRUE(Begin(begin).ok());
  for (uint32_t layer = 0; layer < 2; ++layer) {
    v1::LayerCall call = TestCall(1, layer, 1, 5);
    call.set_q(std::string(2 * 4 * sizeof(float), 0));
    const float nan = std::nanf("");
    std::memcpy(call.mutable_v()->data(), &nan, sizeof(nan));
    ASSERT_TRUE(Call(call).ok());
    EXPECT_TRUE(std::isnan(Out(0)));
    EXPECT_FLOAT_EQ(Out(1), 1);
    EXPECT_FLOAT_EQ(Out(4), 1);
  }
  // The block's next owner does not see it either.
  v1::StepBegin drop;
  drop.set_step(2);
  drop.add_commands()->mutable_drop()->add_sequences(1);
  ASSERT_TRUE(Begin(drop).ok());
  v1::StepBegin next = TestBegin(3, 0);
  next.mutable_rows(0)->set_sequence(3);
  ASSERT_TRUE(Begin(next).ok());
  ASSERT_TRUE(Call(TestCall(3, 0, 6)).ok());
  EXPECT_FLOAT_EQ(Out(), 6);
}

TEST_F(KvShardTest, AStoppedCallIsNotComputed) {
  ASSERT_TRUE(Begin(TestBegin(1, 0)).ok());
  std::atomic<bool> stop{true};
  result_.Clear();
  EXPECT_TRUE(
      absl::IsCancelled(shard_->Call(1, TestCall(1, 0, 1), kernels_.get(), stop, &result_)));
  EXPECT_TRUE(absl::IsInvalidArgument(Call([] {
    v1::LayerCall call = TestCall(1, 0, 1);
    call.clear_k();
    call.clear_v();
    return call;
  }())));
}

TEST_F(KvShardTest, RefusalsCarryTheRows) {
  ASSERT_TRUE(Begin(TestBegin(1, 3)).ok());
  ASSERT_EQ(response_.refused().rows_size(), 1);
  EXPECT_EQ(response_.refused().rows(0).reason(), "UNKNOWN_SEQUENCE");
  v1::StepBegin lane = TestBegin(1, 0);
  lane.set_lane(1);
  EXPECT_TRUE(absl::IsUnimplemented(Begin(lane)));
}

}  // namespace
}  // namespace ringattn::worker
