#include "common/kv/step.h"

#include "gmock/gmock.h"
#include "google/protobuf/text_format.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

using ::testing::HasSubstr;

v1::StepBegin Proto(const std::string& text) {
  v1::StepBegin begin;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &begin)) << text;
  return begin;
}

void ExpectRefused(const std::string& text, absl::StatusCode code, const std::string& message) {
  const auto step = ParseStep(Proto(text), Limits());
  EXPECT_EQ(step.status().code(), code) << text;
  EXPECT_THAT(std::string(step.status().message()), HasSubstr(message));
}

TEST(StepTest, SurvivesTheWayThroughTheProto) {
  const v1::StepBegin proto = Proto(R"(
    step: 7
    commands { fork { source: 1 target: 2 length: 33 } }
    commands { drop { sequences: [1, 5] } }
    rows { sequence: 2 expected_length: 33 keep_length: 30 append_tokens: 4 q_tokens: 2 }
    rows { sequence: 9 q_tokens: 1 tables { group: 1 first: 2 blocks: [7, 8] } }
  )");
  const auto step = ParseStep(proto, Limits());
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_EQ(step->number, 7u);
  EXPECT_EQ(step->q_tokens(), 3);
  EXPECT_EQ(step->append_tokens(), 4);
  EXPECT_EQ(step->rows[0].end(), 34);
  EXPECT_EQ(step->rows[1].tables[0], (KvTableUpdate{1, 2, {7, 8}}));
  EXPECT_EQ(ToProto(*step).SerializeAsString(), proto.SerializeAsString());
  EXPECT_EQ(*ParseStep(ToProto(*step), Limits()), *step);
}

TEST(StepTest, RefusesByName) {
  const auto invalid = absl::StatusCode::kInvalidArgument;
  const auto over = absl::StatusCode::kResourceExhausted;
  const auto later = absl::StatusCode::kUnimplemented;
  ExpectRefused("", invalid, "begin.step is 0");
  ExpectRefused("step: 1 commands {}", invalid, "begin.commands[0] is empty");
  ExpectRefused("step: 1 lane: 2", later, "begin.lane is 2");
  ExpectRefused("step: 1 rows { tree_mask: 'x' }", later, "begin.rows[0].tree_mask");
  ExpectRefused("step: 1 rows {} rows { keep_length: 134217729 }", over,
                "begin.rows[1].keep_length is 134217729; the maximum is 134217728");
  ExpectRefused("step: 1 rows { expected_length: 18446744073709551615 }", over, "expected_length");
  ExpectRefused("step: 1 rows { keep_length: 134217728 append_tokens: 1 }", over,
                "keep_length + append_tokens of begin.rows[0] is 134217729");
  ExpectRefused("step: 1 rows { q_tokens: 65536 } rows { q_tokens: 1 }", over, "q_tokens");
  ExpectRefused("step: 1 rows { append_tokens: 65537 }", over, "append_tokens");
  ExpectRefused("step: 1 commands { fork { length: 134217729 } }", over,
                "begin.commands[0].fork.length");
  ExpectRefused("step: 1 rows { tables { group: 5000 } }", invalid,
                "begin.rows[0].tables[0].group is 5000");
  v1::StepBegin many = Proto("step: 1");
  for (int i = 0; i <= Limits().max_step_rows; ++i) many.add_rows()->set_sequence(i);
  EXPECT_EQ(ParseStep(many, Limits()).status().code(), over);
}

TEST(StepTest, RefusalsCarryTheirNames) {
  const v1::StepRefused refused =
      ToProto(3, {{1, false, RefusalReason::kFull, 64, 2, "no room"},
                  {0, true, RefusalReason::kUnknownSequence, 0, 0, "none"}});
  EXPECT_EQ(refused.step(), 3u);
  EXPECT_EQ(refused.rows(0).reason(), "KV_FULL");
  EXPECT_EQ(refused.rows(0).blocks_missing(), 2u);
  EXPECT_EQ(refused.rows(0).length(), 64u);
  EXPECT_TRUE(refused.rows(1).command());
  EXPECT_EQ(refused.rows(1).reason(), "UNKNOWN_SEQUENCE");
}

}  // namespace
}  // namespace ringattn
