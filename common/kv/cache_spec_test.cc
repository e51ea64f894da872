#include "common/kv/cache_spec.h"

#include <cmath>
#include <limits>

#include "gmock/gmock.h"
#include "google/protobuf/text_format.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

using ::testing::HasSubstr;

constexpr char kGood[] = R"(
  dtype: DATA_TYPE_BFLOAT16 blocks: 100
  groups { layers: [0, 2] num_heads: 8 num_kv_heads: 2 head_dim: 64 }
  groups { layers: [1] num_heads: 8 num_kv_heads: 4 head_dim: 32 head_dim_v: 16
           window_left: 127 softcap: 50 }
)";

v1::KvCacheSpec Proto(const std::string& text) {
  v1::KvCacheSpec spec;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &spec)) << text;
  return spec;
}

std::string Refused(const v1::KvCacheSpec& spec, absl::StatusCode code) {
  const auto parsed = ParseKvCacheSpec(spec, Limits());
  EXPECT_EQ(parsed.status().code(), code) << parsed.status();
  return std::string(parsed.status().message());
}

// The good specification with `change` made to it.
template <typename Change>
std::string RefusedWith(Change change, absl::StatusCode code = absl::StatusCode::kInvalidArgument) {
  v1::KvCacheSpec spec = Proto(kGood);
  change(&spec);
  return Refused(spec, code);
}

TEST(KvCacheSpecTest, ResolvesDefaults) {
  const auto spec = ParseKvCacheSpec(Proto(kGood), Limits());
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->block_tokens, 64);
  EXPECT_EQ(spec->numbering, KvNumbering::kSequences);
  EXPECT_EQ(spec->groups[0].head_dim_v, 64);
  EXPECT_EQ(spec->groups[0].softmax_scale, 0.125);
  EXPECT_TRUE(spec->groups[0].causal);
  EXPECT_EQ(spec->groups[0].window_left, -1);
  EXPECT_EQ(spec->groups[1].window_left, 127);
  EXPECT_EQ(spec->groups[1].softcap, 50);
  EXPECT_EQ(spec->planes(), 2);
}

TEST(KvCacheSpecTest, SurvivesTheWayThroughTheProto) {
  v1::KvCacheSpec proto = Proto(kGood);
  const std::vector<float> sinks{1.5f, -std::numeric_limits<float>::infinity(), 0, 0, 0, 0, 0, 2};
  proto.mutable_groups(1)->set_sinks(sinks.data(), sinks.size() * sizeof(float));
  proto.mutable_groups(1)->set_non_causal(true);
  proto.set_numbering(v1::KV_NUMBERING_BLOCKS);
  proto.set_label("a model");
  const auto spec = ParseKvCacheSpec(proto, Limits());
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->groups[1].sinks, sinks);
  const auto again = ParseKvCacheSpec(ToProto(*spec), Limits());
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(*again, *spec);
}

TEST(KvCacheSpecTest, FindsLayers) {
  const auto spec = ParseKvCacheSpec(Proto(kGood), Limits());
  EXPECT_EQ(FindLayer(*spec, 2), (KvLayerLocation{0, 1}));
  EXPECT_EQ(FindLayer(*spec, 1), (KvLayerLocation{1, 0}));
  EXPECT_EQ(FindLayer(*spec, 3), std::nullopt);
}

TEST(KvCacheSpecTest, NamesTheFieldTheValueAndWhatIsAccepted) {
  EXPECT_EQ(RefusedWith([](auto* s) { s->mutable_groups(1)->set_num_kv_heads(3); }),
            "spec.groups[1].num_kv_heads is 3; it must divide num_heads, 8");
  EXPECT_EQ(RefusedWith([](auto* s) { s->set_block_tokens(48); }),
            "spec.block_tokens is 48; use 16, 32, 64, 128 or 256");
  EXPECT_EQ(RefusedWith([](auto* s) { s->mutable_groups(1)->set_layers(0, 2); }),
            "spec.groups[1].layers[0] is 2; every layer belongs to one group, once");
  EXPECT_EQ(RefusedWith([](auto* s) { s->mutable_groups(0)->set_num_heads(0); }),
            "spec.groups[0].num_heads is 0; it must be at least 1");
  EXPECT_EQ(RefusedWith([](auto* s) { s->mutable_groups(0)->set_sinks("abc"); }),
            "spec.groups[0].sinks has 3 bytes; 2 layers of 8 heads in fp32 need 64");
  EXPECT_THAT(RefusedWith([](auto* s) { s->set_dtype(v1::DATA_TYPE_INT32); }),
              HasSubstr("spec.dtype is 4"));
  EXPECT_THAT(RefusedWith([](auto* s) { s->clear_groups(); }), HasSubstr("spec.groups is empty"));
  EXPECT_THAT(RefusedWith([](auto* s) { s->mutable_groups(0)->clear_layers(); }),
              HasSubstr("spec.groups[0].layers is empty"));
  EXPECT_THAT(RefusedWith([](auto* s) { s->set_blocks(0); }), HasSubstr("spec.blocks is 0"));
  EXPECT_THAT(RefusedWith([](auto* s) { s->set_label("a\nb"); }), HasSubstr("byte 10 at 1"));
  EXPECT_THAT(RefusedWith([](auto* s) { s->set_label(std::string(129, 'x')); }),
              HasSubstr("129 bytes"));
  for (const double bad : {0.0, -1.0, double{NAN}, double{INFINITY}, 1e39}) {
    EXPECT_THAT(RefusedWith([bad](auto* s) { s->mutable_groups(0)->set_softcap(bad); }),
                HasSubstr("softcap"));
  }
  for (const double bad : {double{NAN}, -double{INFINITY}, 1e39}) {
    EXPECT_THAT(RefusedWith([bad](auto* s) { s->mutable_groups(0)->set_softmax_scale(bad); }),
                HasSubstr("softmax_scale"));
  }
  for (const float bad : {NAN, INFINITY}) {
    const std::vector<float> sinks(8, bad);
    EXPECT_THAT(RefusedWith([&](auto* s) {
                  s->mutable_groups(1)->set_sinks(sinks.data(), sinks.size() * sizeof(float));
                }),
                HasSubstr("sinks[0]"));
  }
}

TEST(KvCacheSpecTest, LimitsAndReservedFieldsHaveCodesOfTheirOwn) {
  const auto over = absl::StatusCode::kResourceExhausted;
  EXPECT_EQ(RefusedWith([](auto* s) { s->mutable_groups(0)->set_head_dim(300); }, over),
            "spec.groups[0].head_dim is 300; the maximum is 256");
  EXPECT_THAT(RefusedWith([](auto* s) { s->mutable_groups(0)->set_head_dim_v(257); }, over),
              HasSubstr("head_dim_v is 257"));
  EXPECT_THAT(RefusedWith([](auto* s) { s->mutable_groups(0)->set_num_heads(1025); }, over),
              HasSubstr("num_heads is 1025"));
  EXPECT_THAT(RefusedWith([](auto* s) { s->set_blocks(uint64_t{1} << 40); }, over),
              HasSubstr("spec.blocks"));
  EXPECT_THAT(RefusedWith(
                  [](auto* s) {
                    for (uint32_t i = 0; i < 2000; ++i) s->mutable_groups(0)->add_layers(10 + i);
                  },
                  over),
              HasSubstr("layers in spec.groups is 2003"));
  EXPECT_THAT(
      RefusedWith([](auto* s) { s->mutable_groups(0)->set_sinks(std::string(1 << 20, 'x')); },
                  over),
      HasSubstr("the maximum is 262144"));
  const auto later = absl::StatusCode::kUnimplemented;
  EXPECT_THAT(RefusedWith([](auto* s) { s->mutable_groups(1)->set_latent_rank(512); }, later),
              HasSubstr("spec.groups[1].latent_rank is 512"));
  EXPECT_THAT(
      RefusedWith([](auto* s) { s->mutable_groups(1)->set_storage(v1::KV_STORAGE_FLOAT8_E4M3); },
                  later),
      HasSubstr("spec.groups[1].storage is 2"));
}

TEST(KvCacheSpecTest, AnEndlessWindowIsNone) {
  v1::KvCacheSpec proto = Proto(kGood);
  proto.mutable_groups(1)->set_window_left(~uint64_t{0});
  const auto spec = ParseKvCacheSpec(proto, Limits());
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->groups[1].window_left, -1);
}

}  // namespace
}  // namespace ringattn
