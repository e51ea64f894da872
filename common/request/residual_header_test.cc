// Tests headers that name a residual: which fields they may omit, and which values are rejected.
#include "common/request/residual_header.h"

#include <google/protobuf/text_format.h>

#include <string>

#include "common/request/validation.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

template <typename Header>
Header Parse(const std::string& text) {
  Header header;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &header)) << text;
  return header;
}

constexpr char kShape[] =
    "shape { batch: 2 seq_len_q: 24 seq_len_kv: 32 num_heads: 4 num_kv_heads: 2 head_dim: 16 } "
    "dtype: DATA_TYPE_BFLOAT16 ";

class ResidualHeaderTest : public testing::Test {
 protected:
  explicit ResidualHeaderTest(const std::string& options = "options { causal: true }") {
    const auto forward =
        ValidateRequest(Parse<v1::ForwardHeader>(std::string(kShape) + options), limits_);
    spec_ = std::get<ValidRequest>(forward).spec;
    plan_.layout = Layout::kZigzag;
    plan_.schedule = ScheduleKind::kRing;
    plan_.world_size = 4;
  }

  // Returns the rejected field; empty if the header is accepted.
  std::string Refused(const std::string& text) {
    auto header = Parse<v1::BackwardHeader>("residual_handle: 'h' " + text);
    if (const auto rejected = FillFromResidual(spec_, plan_, members_, limits_, &header)) {
      EXPECT_EQ(rejected->code, absl::StatusCode::kInvalidArgument);
      return rejected->violations[0].field;
    }
    const auto valid = ValidateRequest(header, limits_);
    if (const auto* rejected = std::get_if<Rejection>(&valid)) {
      return rejected->violations[0].field;
    }
    request_ = std::get<ValidRequest>(valid);
    return "";
  }

  Limits limits_;
  AttentionSpec spec_;
  PlanChoice plan_;
  std::vector<std::string> members_ = {"a", "b", "c", "d"};
  ValidRequest request_;
};

TEST_F(ResidualHeaderTest, WhatItLeavesOutIsTheForwards) {
  ASSERT_EQ(Refused(""), "");
  EXPECT_EQ(request_.spec, spec_);
  EXPECT_EQ(request_.choice, plan_);
  EXPECT_EQ(request_.inputs, std::vector<TensorId>{TensorId::kDout});
  EXPECT_FALSE(request_.recompute_forward);
  ASSERT_EQ(Refused("has_dlse: true keep_residual: true"), "");
  EXPECT_EQ(request_.inputs, (std::vector<TensorId>{TensorId::kDout, TensorId::kDlse}));
  EXPECT_TRUE(request_.keep_residual);
}

TEST_F(ResidualHeaderTest, WhatItSaysMustBeTheForwards) {
  EXPECT_EQ(Refused(kShape), "");
  EXPECT_EQ(Refused("options { causal: true softmax_scale: 0.25 }"), "");  // the default
  EXPECT_EQ(Refused("plan { layout: LAYOUT_ZIGZAG world_size: 4 stripe: 1 }"), "");
  EXPECT_EQ(Refused("reply { output_dtype: DATA_TYPE_BFLOAT16 max_chunk_bytes: 65536 }"), "");
  EXPECT_EQ(Refused("shape { batch: 3 seq_len_q: 24 seq_len_kv: 32 num_heads: 4 num_kv_heads: 2 "
                    "head_dim: 16 }"),
            "shape.batch");
  EXPECT_EQ(
      Refused("shape { seq_len_q: 24 seq_len_kv: 32 num_heads: 4 num_kv_heads: 2 head_dim: 16 }"),
      "shape.batch");
  EXPECT_EQ(Refused("dtype: DATA_TYPE_FLOAT32"), "dtype");
  EXPECT_EQ(Refused("options { causal: true softcap: 3 }"), "options.softcap");
  EXPECT_EQ(Refused("options {}"), "options.causal");
  EXPECT_EQ(Refused("options { causal: true sinks {} }"), "options.sinks");
  EXPECT_EQ(Refused("plan { layout: LAYOUT_CONTIGUOUS }"), "plan.layout");
  EXPECT_EQ(Refused("plan { schedule: SCHEDULE_SINGLE }"), "plan.schedule");
  EXPECT_EQ(Refused("plan { world_size: 2 }"), "plan.world_size");
  EXPECT_EQ(Refused("plan { stripe: 2 }"), "plan.stripe");
  EXPECT_EQ(Refused("plan { heads_per_step: 1 }"), "plan.heads_per_step");
  EXPECT_EQ(Refused("reply { output_dtype: DATA_TYPE_FLOAT32 }"), "reply.output_dtype");
  EXPECT_EQ(Refused("has_forward_result: true"), "has_forward_result");
  EXPECT_EQ(Refused("inline_tensors { tensor: TENSOR_ID_Q }"), "inline_tensors[0].tensor");
}

TEST_F(ResidualHeaderTest, MembersAreTheForwardsAndTuningIsItsOwn) {
  EXPECT_EQ(Refused("plan { members: 'a' }"), "plan.members");
  EXPECT_EQ(Refused("plan { members: ['a', 'b', 'd', 'c'] }"), "plan.members");  // by ring rank
  EXPECT_EQ(Refused("plan { members: ['a', 'b', 'c', 'd', 'e'] }"), "plan.members");
  ASSERT_EQ(Refused("plan { members: ['a', 'b', 'c', 'd'] world_size: 4 }"), "");
  EXPECT_EQ(request_.choice, plan_);  // a residual needs no member names
  ASSERT_EQ(Refused("plan { tuning { tile_q: 96 } }"), "");
  EXPECT_EQ(request_.choice.tuning.tile_q, 96);
}

TEST_F(ResidualHeaderTest, NothingThatIsUnknownIsReplacedUnseen) {
  auto header = Parse<v1::BackwardHeader>("residual_handle: 'h'");
  auto* options = header.mutable_options();
  options->set_causal(true);
  options->GetReflection()->MutableUnknownFields(options)->AddVarint(999, 1);
  const auto rejected = FillFromResidual(spec_, plan_, members_, limits_, &header);
  ASSERT_TRUE(rejected.has_value());
  EXPECT_NE(rejected->violations[0].field.find("999"), std::string::npos);
}

TEST_F(ResidualHeaderTest, HeadsPerStepAreTheForwards) {
  plan_.schedule = ScheduleKind::kAllGather;
  plan_.heads_per_step = 1;
  ASSERT_EQ(Refused(""), "");
  EXPECT_EQ(request_.choice, plan_);
  EXPECT_EQ(Refused("plan { schedule: SCHEDULE_ALL_GATHER heads_per_step: 1 }"), "");
  EXPECT_EQ(Refused("plan { heads_per_step: 2 }"), "plan.heads_per_step");
}

// On one device the Forward's plan options differ from its resolved plan; both calls accept the
// same flags.
TEST_F(ResidualHeaderTest, OnOneDeviceEveryScheduleIsSingle) {
  plan_.layout = Layout::kContiguous;
  plan_.schedule = ScheduleKind::kSingle;
  plan_.world_size = 1;
  members_ = {"a"};
  for (const char* said : {"SCHEDULE_SINGLE", "SCHEDULE_RING", "SCHEDULE_ALL_GATHER",
                           "SCHEDULE_PASS_Q", "SCHEDULE_REPLICATED_Q"}) {
    ASSERT_EQ(Refused(std::string("plan { members: 'a' schedule: ") + said + " }"), "") << said;
    EXPECT_EQ(request_.choice, plan_) << said;
  }
  EXPECT_EQ(Refused("plan { schedule: SCHEDULE_ALL_GATHER heads_per_step: 1 }"), "");
  EXPECT_EQ(Refused("plan { schedule: SCHEDULE_RING heads_per_step: 1 }"), "plan.heads_per_step");
  EXPECT_EQ(Refused("plan { schedule: 77 }"), "plan.schedule");
  EXPECT_EQ(Refused("plan { world_size: 2 }"), "plan.world_size");
}

class RichResidualHeaderTest : public ResidualHeaderTest {
 protected:
  RichResidualHeaderTest()
      : ResidualHeaderTest(
            "options { softcap: 2 window { left: 3 right: -1 } "
            "dropout { rate: 0.1 seed: 7 } alibi { slopes: [1, 2, 3, 4] } "
            "bias { per_head: true gradient: true } sinks {} } "
            "reply { output_dtype: DATA_TYPE_FLOAT32 }") {}
};

TEST_F(RichResidualHeaderTest, EveryOptionComesAlong) {
  plan_.layout = Layout::kStriped;
  plan_.stripe = 4;
  ASSERT_EQ(Refused(""), "");
  EXPECT_EQ(request_.spec, spec_);
  EXPECT_EQ(request_.choice, plan_);
  EXPECT_EQ(request_.outputs, OutputsOf(spec_, Direction::kBackward));
  EXPECT_EQ(Refused("options { softcap: 2 window { left: 3 right: -1 } "
                    "dropout { rate: 0.1 seed: 8 } alibi { slopes: [1, 2, 3, 4] } "
                    "bias { per_head: true gradient: true } sinks {} }"),
            "options.dropout");
}

TEST(RetainTest, TimeToLiveIsBounded) {
  Limits limits;
  const auto ttl = [&](const std::string& text) {
    const auto valid =
        ValidateRequest(Parse<v1::ForwardHeader>(std::string(kShape) + text), limits);
    if (const auto* rejected = std::get_if<Rejection>(&valid)) {
      EXPECT_EQ(rejected->violations[0].field, "retain.ttl");
      return absl::ZeroDuration();
    }
    return std::get<ValidRequest>(valid).retain_ttl.value_or(absl::InfiniteDuration());
  };
  EXPECT_EQ(ttl(""), absl::InfiniteDuration());  // no residual is kept
  EXPECT_EQ(ttl("retain {}"), limits.default_residual_ttl);
  EXPECT_EQ(ttl("retain { ttl { seconds: 5 } }"), absl::Seconds(5));
  EXPECT_EQ(ttl("retain { ttl {} }"), absl::ZeroDuration());
  EXPECT_EQ(ttl("retain { ttl { seconds: -5 } }"), absl::ZeroDuration());
  EXPECT_EQ(ttl("retain { ttl { seconds: 1000000 } }"), absl::ZeroDuration());
}

}  // namespace
}  // namespace ringattn
