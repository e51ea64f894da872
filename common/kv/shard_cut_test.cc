#include "common/kv/shard_cut.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "common/kv/kv_error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

using ::testing::HasSubstr;

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

KvCacheSpec Spec() {
  KvCacheSpec spec;
  spec.block_tokens = 16;
  spec.blocks = 8;
  spec.groups.resize(1);
  spec.groups[0].layers = {4};
  spec.groups[0].num_heads = 4;
  spec.groups[0].num_kv_heads = 2;
  spec.groups[0].head_dim = 2;
  spec.groups[0].head_dim_v = 1;
  return spec;
}

KvStep OneStep() {
  KvStep step;
  step.number = 1;
  step.rows = {{1, 14, 14, 4, 2, {}}, {2, 33, 33, 1, 1, {}}};
  return step;
}

std::string Floats(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}
std::vector<float> FloatsOf(const std::string& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}
// first, first + 1, ...
std::string Counting(int64_t count, float first) {
  std::vector<float> values(count);
  for (int64_t i = 0; i < count; ++i) values[i] = first + static_cast<float>(i);
  return Floats(values);
}

v1::LayerCall Call(v1::KvOutput output) {
  v1::LayerCall call;
  call.set_step(1);
  call.set_layer(4);
  call.set_output(output);
  call.set_q(Counting(3 * 4 * 2, 0));
  call.set_k(Counting(5 * 2 * 2, 100));
  call.set_v(Counting(5 * 2 * 1, 200));
  return call;
}

TEST(ShardCutTest, SizesAreCheckedByName) {
  const KvCallBytes bytes = CallBytes(Spec(), OneStep(), 0, v1::KV_OUTPUT_OUT_AND_LSE);
  EXPECT_EQ(bytes.q, 3 * 4 * 2 * 4);
  EXPECT_EQ(bytes.k, 5 * 2 * 2 * 4);
  EXPECT_EQ(bytes.v, 5 * 2 * 1 * 4);
  EXPECT_EQ(bytes.out, 3 * 4 * 4);
  EXPECT_EQ(bytes.lse, 3 * 4 * 4);
  v1::LayerCall call = Call(v1::KV_OUTPUT_OUT);
  EXPECT_TRUE(CheckCallBytes(call, bytes).ok());
  call.mutable_v()->resize(8);
  EXPECT_EQ(KvErrorReason(CheckCallBytes(call, bytes)), "BAD_CALL");
  EXPECT_THAT(std::string(CheckCallBytes(call, bytes).message()),
              HasSubstr("call.v has 8 bytes; the step needs 40"));
  call.clear_v();
  EXPECT_FALSE(CheckCallBytes(call, bytes).ok());
  call.clear_k();
  EXPECT_TRUE(CheckCallBytes(call, bytes).ok());
  call.mutable_q()->push_back('x');
  EXPECT_FALSE(CheckCallBytes(call, bytes).ok());
}

TEST(ShardCutTest, RanksGetTheirHeadsAndEntries) {
  const KvPlacement placement{2, 2};
  const v1::LayerCall call = Call(v1::KV_OUTPUT_OUT);
  // Entries 14 and 15 of sequence 1 are on part 0, 16 and 17 on part 1; 33 of sequence 2 is in the
  // third block, on part 0.
  const v1::LayerCall cut = CutCall(Spec(), placement, OneStep(), call, 2);  // heads 2 and 3
  EXPECT_EQ(cut.output(), v1::KV_OUTPUT_PARTIAL);
  EXPECT_EQ(FloatsOf(cut.q()), (std::vector<float>{4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23}));
  EXPECT_EQ(FloatsOf(cut.k()), (std::vector<float>{102, 103, 106, 107, 118, 119}));
  EXPECT_EQ(FloatsOf(cut.v()), (std::vector<float>{201, 203, 209}));
  const v1::LayerCall other = CutCall(Spec(), placement, OneStep(), call, 3);
  EXPECT_EQ(FloatsOf(other.v()), (std::vector<float>{205, 207}));
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_TRUE(CheckCallBytes(
                    CutCall(Spec(), placement, OneStep(), call, rank),
                    CallBytesOfRank(Spec(), placement, OneStep(), 0, v1::KV_OUTPUT_PARTIAL, rank))
                    .ok());
  }
}

TEST(ShardCutTest, HeadsAreInterleaved) {
  const KvPlacement placement{2, 1};
  std::vector<v1::LayerResult> results(2);
  for (int rank = 0; rank < 2; ++rank) {
    results[rank].set_out(Counting(3 * 2, 10.0f * (rank + 1)));
    results[rank].set_lse(Counting(2 * 3, 100.0f * (rank + 1)));
    results[rank].mutable_device_time()->set_nanos(5 - rank);
  }
  const auto joined =
      JoinResults(Spec(), placement, OneStep(), Call(v1::KV_OUTPUT_OUT_AND_LSE), results);
  ASSERT_TRUE(joined.ok()) << joined.status();
  EXPECT_EQ(FloatsOf(joined->out()),
            (std::vector<float>{10, 11, 20, 21, 12, 13, 22, 23, 14, 15, 24, 25}));
  EXPECT_EQ(FloatsOf(joined->lse()),
            (std::vector<float>{100, 101, 102, 103, 104, 105, 200, 201, 202, 203, 204, 205}));
  EXPECT_EQ(joined->device_time().nanos(), 5);
  results[1].mutable_out()->pop_back();
  EXPECT_EQ(JoinResults(Spec(), placement, OneStep(), Call(v1::KV_OUTPUT_OUT_AND_LSE), results)
                .status()
                .code(),
            absl::StatusCode::kInternal);
  results.pop_back();
  EXPECT_FALSE(
      JoinResults(Spec(), placement, OneStep(), Call(v1::KV_OUTPUT_OUT_AND_LSE), results).ok());
}

TEST(ShardCutTest, PartialsMergeAndSinksJoinAfterwards) {
  KvCacheSpec spec = Spec();
  spec.groups[0].num_heads = spec.groups[0].num_kv_heads = 2;
  spec.groups[0].sinks = {1.0f, kNegativeInfinity};
  KvStep step;
  step.number = 1;
  step.rows = {{1, 1, 1, 0, 2, {}}};
  const KvPlacement placement{1, 2};
  std::vector<v1::LayerResult> results(2);
  // Query 0 sees keys on both parts, query 1 on none.
  results[0].set_out(Floats({4, 8, 0, 0}));
  results[0].set_lse(Floats({0, kNegativeInfinity, std::log(3.0f), kNegativeInfinity}));
  results[1].set_out(Floats({2, 4, 0, 0}));
  results[1].set_lse(Floats({0, kNegativeInfinity, 0, kNegativeInfinity}));
  v1::LayerCall call;
  call.set_step(1);
  call.set_layer(4);
  call.set_output(v1::KV_OUTPUT_PARTIAL);
  auto joined = JoinResults(spec, placement, step, call, results);
  ASSERT_TRUE(joined.ok()) << joined.status();
  std::vector<float> out = FloatsOf(joined->out());
  EXPECT_FLOAT_EQ(out[0], 3);
  EXPECT_FLOAT_EQ(out[1], 7);
  EXPECT_EQ(out[2], 0);
  EXPECT_EQ(FloatsOf(joined->lse())[1], kNegativeInfinity);
  EXPECT_FLOAT_EQ(FloatsOf(joined->lse())[2], std::log(4.0f));

  call.set_output(v1::KV_OUTPUT_OUT_AND_LSE);
  joined = JoinResults(spec, placement, step, call, results);
  out = FloatsOf(joined->out());
  EXPECT_FLOAT_EQ(out[0], 3 * 2 / (2 + std::exp(1.0f)));
  EXPECT_FLOAT_EQ(out[1], 7);  // head 1 has no sink
  EXPECT_EQ(out[2], 0);
  EXPECT_FLOAT_EQ(FloatsOf(joined->lse())[0], std::log(2 + std::exp(1.0f)));
  EXPECT_FLOAT_EQ(FloatsOf(joined->lse())[1], 1);  // the sink alone
  EXPECT_EQ(FloatsOf(joined->lse())[3], kNegativeInfinity);

  call.set_output(v1::KV_OUTPUT_NONE);
  for (auto& result : results) {
    result.clear_out();
    result.clear_lse();
  }
  joined = JoinResults(spec, placement, step, call, results);
  ASSERT_TRUE(joined.ok());
  EXPECT_TRUE(joined->out().empty());
}

}  // namespace
}  // namespace ringattn
