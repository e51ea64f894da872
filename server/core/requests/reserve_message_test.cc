#include "server/core/requests/reserve_message.h"

#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

TEST(ReserveMessageTest, CarriesTheInputsOfTheSchedule) {
  RequestArrived request;
  request.spec.dtype = DType::kBFloat16;
  request.spec.shape.packed = true;
  request.spec.shape.seq_len_q = 5;
  request.spec.shape.seq_len_kv = 7;
  request.spec.shape.num_heads = 4;
  request.spec.shape.num_kv_heads = 2;
  request.spec.shape.head_dim = 64;
  request.spec.shape.head_dim_v = 32;
  request.spec.shape.cu_seqlens_q = {0, 2, 5};
  request.spec.shape.cu_seqlens_k = {0, 7, 7};
  request.spec.options.softmax_scale = 0.0;
  request.spec.options.causal = true;
  request.spec.options.window_left = 0;
  request.with_timeline = true;
  request.request_id = "mine";
  request.traceparent = "00-trace";
  Plan plan;
  plan.recipe = {.schedule = ScheduleKind::kRing,
                 .layout = Layout::kStriped,
                 .stripe = 3,
                 .direction = Direction::kBackward,
                 .recompute_forward = true,
                 .heads_per_step = 2};

  const v1::Reserve reserve = MakeReserve(request, request.spec, plan, "9-1", 9, {2, 0});
  EXPECT_EQ(reserve.operation_id(), "9-1");
  EXPECT_EQ(reserve.generation(), 9);
  ASSERT_EQ(reserve.members_size(), 2);
  EXPECT_EQ(reserve.members(0), 2);
  EXPECT_TRUE(reserve.backward());
  EXPECT_TRUE(reserve.recompute_forward());
  EXPECT_TRUE(reserve.with_timeline());
  EXPECT_EQ(reserve.dtype(), v1::DATA_TYPE_BFLOAT16);
  EXPECT_EQ(reserve.layout(), v1::LAYOUT_STRIPED);
  EXPECT_EQ(reserve.schedule(), v1::SCHEDULE_RING);
  EXPECT_EQ(reserve.stripe(), 3);
  EXPECT_EQ(reserve.heads_per_step(), 2u);
  EXPECT_EQ(reserve.shape().seq_len_q(), 5);
  EXPECT_EQ(reserve.shape().seq_len_kv(), 7);
  EXPECT_EQ(reserve.shape().num_kv_heads(), 2);
  EXPECT_EQ(reserve.shape().head_dim_v(), 32);
  ASSERT_EQ(reserve.shape().packed().cu_seqlens_k_size(), 3);
  EXPECT_EQ(reserve.shape().packed().cu_seqlens_k(1), 7);
  // Zero is a valid value and differs from an absent one.
  EXPECT_TRUE(reserve.options().has_softmax_scale());
  EXPECT_EQ(reserve.options().softmax_scale(), 0.0);
  EXPECT_FALSE(reserve.options().has_softcap());
  EXPECT_EQ(reserve.options().window().left(), 0);
  EXPECT_EQ(reserve.options().window().right(), -1);
  EXPECT_EQ(reserve.request_id(), "mine");
  EXPECT_EQ(reserve.traceparent(), "00-trace");
}

}  // namespace
}  // namespace ringattn::server
