#include "common/wire/raw_request.h"

#include "gtest/gtest.h"

namespace ringattn {
namespace {

TEST(RawRequest, AClientsWordsAreTakenAsTheyAre) {
  RawRequest raw;
  v1::AttentionShape shape;
  shape.set_head_dim_v(24);
  shape.set_seq_len_q(~uint64_t{0});
  shape.mutable_packed()->add_cu_seqlens_q(9);
  ReadShape(shape, &raw);
  EXPECT_EQ(raw.seq_len_q, ~uint64_t{0});
  EXPECT_EQ(raw.head_dim_v, 24u);
  EXPECT_TRUE(raw.packed);
  EXPECT_EQ(raw.cu_seqlens_q, std::vector<uint64_t>{9});

  ReadOptions({}, &raw);
  EXPECT_FALSE(raw.softmax_scale || raw.softcap || raw.causal || raw.window);
  v1::AttentionOptions options;
  options.set_softmax_scale(0);
  options.mutable_window()->set_left(-5);
  ReadOptions(options, &raw);
  EXPECT_EQ(raw.softmax_scale, 0.0);
  EXPECT_EQ(raw.window->left, -5);

  v1::PlanOptions plan;
  ReadPlan(plan, &raw);
  EXPECT_FALSE(raw.layout || raw.schedule || raw.world_size || raw.stripe);
  plan.set_layout(v1::LAYOUT_STRIPED);
  plan.set_schedule(v1::SCHEDULE_SINGLE);
  plan.set_world_size(3);
  plan.set_stripe(0);
  ReadPlan(plan, &raw);
  EXPECT_EQ(raw.layout, Layout::kStriped);
  EXPECT_EQ(raw.schedule, ScheduleKind::kSingle);
  EXPECT_EQ(raw.world_size, 3u);
  EXPECT_EQ(raw.stripe, 0u);
}

}  // namespace
}  // namespace ringattn
