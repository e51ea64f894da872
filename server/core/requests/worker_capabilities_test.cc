// Tests of named members and tuning values against the workers' registrations.
#include "server/core/requests/worker_capabilities.h"

#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

v1::Register Worker() {
  v1::Register worker;
  worker.set_name("a");
  worker.set_device("cpu");
  worker.add_options("bias");
  for (uint32_t tile : {12, 96}) worker.mutable_tuning()->add_tile_q(tile);
  worker.mutable_tuning()->add_key_splits(1);
  return worker;
}

TEST(WorkerCapabilitiesTest, OnlyNamedMembersMayServe) {
  PlanChoice choice;
  EXPECT_TRUE(MayServe(choice, "a"));
  choice.members = {"b", "c"};
  EXPECT_FALSE(MayServe(choice, "a"));
  EXPECT_TRUE(MayServe(choice, "c"));
}

TEST(WorkerCapabilitiesTest, OfferedValuesAreServed) {
  AttentionSpec spec;
  PlanChoice choice;
  EXPECT_FALSE(CheckServedBy(Worker(), spec, choice).has_value());
  spec.options.bias = BiasForm();
  choice.tuning = {96, 0, 1};
  EXPECT_FALSE(CheckServedBy(Worker(), spec, choice).has_value());
}

TEST(WorkerCapabilitiesTest, OtherValuesAreRejectedWithTheAcceptedOnes) {
  AttentionSpec spec;
  PlanChoice choice;
  choice.tuning.tile_q = 24;
  const std::optional<Failure> tile = CheckServedBy(Worker(), spec, choice);
  ASSERT_TRUE(tile.has_value());
  EXPECT_EQ(tile->code, absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(tile->field, "plan.tuning.tile_q");
  EXPECT_EQ(tile->message,
            "plan.tuning.tile_q: is 24; the kernels of device cpu (worker a) take 12, 96");
  choice.tuning = {0, 64, 0};
  EXPECT_EQ(CheckServedBy(Worker(), spec, choice)->message,
            "plan.tuning.tile_kv: is 64; the kernels of device cpu (worker a) take none");
  choice.tuning = {0, 0, 2};
  EXPECT_EQ(CheckServedBy(Worker(), spec, choice)->field, "plan.tuning.key_splits");
  choice.tuning = {};
  spec.probability_rows = {{0, 0}};
  const std::optional<Failure> rows = CheckServedBy(Worker(), spec, choice);
  ASSERT_TRUE(rows.has_value());
  EXPECT_EQ(rows->code, absl::StatusCode::kUnimplemented);
  EXPECT_EQ(rows->reason, "OPTION_NOT_SERVED");
  EXPECT_EQ(rows->field, "reply.probability_rows");
}

}  // namespace
}  // namespace ringattn::server
