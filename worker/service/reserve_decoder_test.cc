#include "worker/service/reserve_decoder.h"

#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/strip.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

v1::Reserve Valid() {
  v1::Reserve reserve;
  reserve.set_operation_id("1-1");
  for (uint32_t member : {2, 0, 1}) reserve.add_members(member);
  v1::AttentionShape* shape = reserve.mutable_shape();
  shape->set_batch(2);
  shape->set_seq_len_q(50);
  shape->set_seq_len_kv(60);
  shape->set_num_heads(4);
  shape->set_num_kv_heads(2);
  shape->set_head_dim(8);
  shape->set_head_dim_v(16);
  reserve.set_dtype(v1::DATA_TYPE_BFLOAT16);
  reserve.mutable_options()->set_softmax_scale(0.5);
  reserve.mutable_options()->set_causal(true);
  reserve.set_layout(v1::LAYOUT_STRIPED);
  reserve.set_stripe(2);
  reserve.set_schedule(v1::SCHEDULE_RING);
  return reserve;
}

TEST(ReserveDecoder, EveryRankGetsItsProgramOfOnePlan) {
  v1::Reserve reserve = Valid();
  reserve.mutable_options()->mutable_window()->set_left(7);
  reserve.mutable_options()->mutable_window()->set_right(-1);
  reserve.mutable_options()->set_softcap(3);
  for (int rank = 0; rank < 3; ++rank) {
    auto decoded = DecodeReserve(reserve, rank, 4);
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(decoded->members, (std::vector<int>{2, 0, 1}));
    EXPECT_EQ(decoded->members[decoded->program.rank], rank);
    EXPECT_EQ(decoded->plan.world_size, 3);
    EXPECT_EQ(decoded->plan.stripe, 2);
    EXPECT_EQ(decoded->plan.layout, Layout::kStriped);
    EXPECT_EQ(decoded->spec.dtype, DType::kBFloat16);
    EXPECT_EQ(decoded->spec.options.window_left, 7);
    EXPECT_EQ(decoded->spec.options.window_right, -1);
    EXPECT_EQ(decoded->spec.options.softcap, 3);
    EXPECT_EQ(decoded->spec.shape.cu_seqlens_k, (std::vector<int64_t>{0, 60}));
    EXPECT_GT(decoded->program.BufferBytes(), 0);
  }
}

TEST(ReserveDecoder, HostsDecideLanes) {
  const v1::Reserve reserve = Valid();  // members 2, 0, 1
  const auto lanes_of = [&](int rank, const std::vector<int>& hosts) {
    const auto decoded = DecodeReserve(reserve, rank, 3, hosts);
    EXPECT_TRUE(decoded.ok()) << decoded.status();
    std::set<std::pair<int, Lane>> lanes;  // with the generation rank of the peer
    for (const Step& step : decoded->program.steps) {
      for (const Transfer& transfer : step.transfers) {
        lanes.insert({decoded->members[transfer.peer], transfer.lane});
      }
    }
    return lanes;
  };
  using Lanes = std::set<std::pair<int, Lane>>;
  EXPECT_EQ(lanes_of(0, {}), (Lanes{{1, Lane::kInside}, {2, Lane::kInside}}));
  EXPECT_EQ(lanes_of(0, {0, 0, 1}), (Lanes{{1, Lane::kInside}, {2, Lane::kBetween}}));
  EXPECT_EQ(lanes_of(2, {0, 0, 1}), (Lanes{{0, Lane::kBetween}, {1, Lane::kBetween}}));
}

// The message names the schedule, because one member may mean a single device or a ring of one.
TEST(ReserveDecoder, UsesScheduleOfReserve) {
  v1::Reserve reserve = Valid();
  reserve.clear_members();
  reserve.add_members(1);
  for (const v1::Schedule schedule : {v1::SCHEDULE_SINGLE, v1::SCHEDULE_RING}) {
    reserve.set_schedule(schedule);
    auto decoded = DecodeReserve(reserve, 1, 2);
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(decoded->program.SentBytes(), 0);
    EXPECT_EQ(decoded->program.steps.size(), 1u);
  }
}

TEST(ReserveDecoder, UsesHeadsPerStepOfReserve) {
  v1::Reserve reserve = Valid();
  reserve.set_schedule(v1::SCHEDULE_ALL_GATHER);
  reserve.mutable_shape()->set_num_heads(4);
  reserve.mutable_shape()->set_num_kv_heads(4);
  const auto whole = DecodeReserve(reserve, 0, 3);
  reserve.set_heads_per_step(1);
  const auto one = DecodeReserve(reserve, 0, 3);
  ASSERT_TRUE(whole.ok() && one.ok()) << one.status();
  EXPECT_EQ(one->program.PairCount(), whole->program.PairCount());
  EXPECT_GT(one->program.steps.size(), whole->program.steps.size());
}

// With all heads in one step there is nothing to sum.
TEST(ReserveDecoder, AllowsSharedBiasGradientWithAllHeadsInOneStep) {
  v1::Reserve reserve = Valid();
  reserve.set_schedule(v1::SCHEDULE_ALL_GATHER);
  reserve.set_backward(true);
  reserve.mutable_options()->mutable_bias()->set_gradient(true);
  const auto whole = DecodeReserve(reserve, 0, 3);
  reserve.set_heads_per_step(reserve.shape().num_kv_heads());
  const auto one = DecodeReserve(reserve, 0, 3);
  ASSERT_TRUE(whole.ok() && one.ok()) << one.status();
  EXPECT_EQ(one->program.steps.size(), whole->program.steps.size());
}

TEST(ReserveDecoder, DecodesPackedDocuments) {
  v1::Reserve reserve = Valid();
  reserve.mutable_shape()->set_batch(1);
  for (uint64_t x : {0, 20, 20, 50}) reserve.mutable_shape()->mutable_packed()->add_cu_seqlens_q(x);
  for (uint64_t x : {0, 1, 30, 60}) reserve.mutable_shape()->mutable_packed()->add_cu_seqlens_k(x);
  auto decoded = DecodeReserve(reserve, 0, 3);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_TRUE(decoded->spec.shape.packed);
  EXPECT_EQ(decoded->spec.shape.num_documents(), 3);
}

// If queries travel, each rank holds the columns of its own keys.
TEST(ReserveDecoder, ShardsBiasAsScheduleRequires) {
  v1::Reserve reserve = Valid();
  reserve.mutable_options()->mutable_bias()->set_per_head(true);
  for (const v1::Schedule schedule : {v1::SCHEDULE_RING, v1::SCHEDULE_PASS_Q}) {
    reserve.set_schedule(schedule);
    for (int rank = 0; rank < 3; ++rank) {
      const auto decoded = DecodeReserve(reserve, rank, 4);
      ASSERT_TRUE(decoded.ok()) << decoded.status();
      const bool by_keys = schedule == v1::SCHEDULE_PASS_Q;
      EXPECT_EQ(ShardsPairsByKeys(decoded->plan), by_keys);
      const int place = decoded->program.rank;
      const int64_t pairs =
          by_keys ? 50 * RowsIn(decoded->plan.kv[place]) : 60 * RowsIn(decoded->plan.q[place]);
      for (const BufferSpec& buffer : decoded->program.buffers) {
        if (buffer.input == TensorId::kBias) {
          EXPECT_EQ(buffer.bytes, 4 * pairs * 2);
        }
      }
    }
  }
  reserve.mutable_shape()->set_batch(1);
  for (uint64_t x : {0, 20, 50}) reserve.mutable_shape()->mutable_packed()->add_cu_seqlens_q(x);
  for (uint64_t x : {0, 30, 60}) reserve.mutable_shape()->mutable_packed()->add_cu_seqlens_k(x);
  EXPECT_EQ(
      DecodeReserve(reserve, 0, 3).status().message(),
      "malformed Reserve: schedule: is pass_q, which does not support a bias of packed documents: "
      "use ring, all_gather or single");
}

TEST(ReserveDecoder, RejectsInvalidFieldsByName) {
  const std::function<void(v1::Reserve&)> faults[] = {
      [](auto& r) { r.clear_members(); },
      [](auto& r) { r.set_members(0, 9); },
      [](auto& r) { r.set_members(1, 3); },
      [](auto& r) { r.set_members(0, 1); },
      [](auto& r) { r.set_dtype(v1::DATA_TYPE_UNSPECIFIED); },
      [](auto& r) { r.set_layout(v1::LAYOUT_UNSPECIFIED); },
      [](auto& r) { r.set_schedule(v1::SCHEDULE_SINGLE); },
      [](auto& r) { r.clear_schedule(); },
      [](auto& r) { r.set_schedule(static_cast<v1::Schedule>(99)); },
      [](auto& r) { r.set_recompute_forward(true); },
      [](auto& r) { r.set_heads_per_step(1); },  // of a ring
      [](auto& r) {
        r.set_schedule(v1::SCHEDULE_ALL_GATHER);
        r.set_heads_per_step(r.shape().num_kv_heads() + 1);
      },
      [](auto& r) {
        r.set_schedule(v1::SCHEDULE_ALL_GATHER);
        r.set_heads_per_step(1);
        r.mutable_options()->mutable_bias()->set_gradient(true);
      },
      [](auto& r) {
        r.set_schedule(v1::SCHEDULE_PASS_Q);
        r.mutable_options()->mutable_bias();
        r.mutable_shape()->set_seq_len_q(60);  // as many queries as keys, which dilation requires
        r.mutable_options()->add_dilation_levels()->set_segment_length(4);
        r.mutable_options()->mutable_dilation_levels(0)->set_dilation_rate(1);
      },
      [](auto& r) {
        r.set_schedule(v1::SCHEDULE_REPLICATED_Q);
        r.mutable_options()->mutable_mask()->set_encoding(v1::MASK_ENCODING_BITS);
      },
      [](auto& r) { r.set_stripe(~uint64_t{0}); },
      [](auto& r) { r.mutable_shape()->set_num_kv_heads(3); },
      [](auto& r) { r.mutable_shape()->set_num_kv_heads(0); },
      [](auto& r) { r.mutable_shape()->set_head_dim(0); },
      [](auto& r) { r.mutable_shape()->set_head_dim_v(577); },
      [](auto& r) { r.mutable_shape()->set_seq_len_q(uint64_t{1} << 50); },
      [](auto& r) { r.mutable_shape()->set_batch(uint64_t{1} << 60); },
      [](auto& r) { r.mutable_shape()->mutable_packed(); },
      [](auto& r) {
        r.mutable_shape()->set_batch(1);
        for (uint64_t x : {0, 60, 50}) r.mutable_shape()->mutable_packed()->add_cu_seqlens_q(x);
        for (uint64_t x : {0, 1, 60}) r.mutable_shape()->mutable_packed()->add_cu_seqlens_k(x);
      },
  };
  int index = 0;
  for (const auto& fault : faults) {
    v1::Reserve reserve = Valid();
    fault(reserve);
    const absl::Status status = DecodeReserve(reserve, 0, 3).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << "fault " << index;
    // The message names a field of Reserve.
    const std::string detail(absl::StripPrefix(status.message(), "malformed Reserve: "));
    const std::string field = detail.substr(0, detail.find_first_of(".:["));
    EXPECT_NE(v1::Reserve::descriptor()->FindFieldByName(field), nullptr) << status.message();
    ++index;
  }
}

}  // namespace
}  // namespace ringattn::worker
