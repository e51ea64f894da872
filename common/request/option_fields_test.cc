#include "common/request/option_fields.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/text_format.h>

#include <algorithm>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace ringattn {
namespace {

// A value with an effect for every field. A field of the message without a sample fails the test,
// so that a new field gets one.
struct Sample {
  const char* field;
  const char* text;
};
constexpr Sample kSamples[] = {
    {"softmax_scale", "softmax_scale: 0.3"},
    {"softcap", "softcap: 30"},
    {"causal", "causal: true"},
    {"window", "window { left: 5 right: 7 }"},
    {"dropout", "dropout { rate: 0.25 seed: 4 first_head: 2 }"},
    {"alibi", "alibi { slopes: 0.5 }"},
    {"bias", "bias { per_head: true }"},
    {"mask", "mask { encoding: MASK_ENCODING_BITS }"},
    {"segment_ids", "segment_ids {}"},
    {"sinks", "sinks {}"},
    {"dilation_levels",
     "dilation_levels { segment_length: 64 dilation_rate: 2 head_begin: 0 head_end: 1 } "
     "dilation_levels { segment_length: 8 dilation_rate: 1 offset: 0 head_begin: 0 head_end: 1 }"},
    {"deterministic", "deterministic: DETERMINISM_SAME_RING"},
    {"compute_dtype", "compute_dtype: COMPUTE_DTYPE_FLOAT8_E4M3"},
};

v1::AttentionOptions Parse(const std::string& text) {
  v1::AttentionOptions options;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &options)) << text;
  return options;
}

AttentionShape SomeShape() {
  AttentionShape shape;
  shape.head_dim = 16;
  return shape;
}

const OptionField* Find(const std::string& name) {
  for (const OptionField& field : OptionFields()) {
    if (field.name == name) return &field;
  }
  return nullptr;
}

TEST(OptionFields, EveryFieldOfTheMessageIsInTheTableOnce) {
  const auto* type = v1::AttentionOptions::GetDescriptor();
  EXPECT_EQ(static_cast<size_t>(type->field_count()), OptionFields().size());
  EXPECT_EQ(static_cast<size_t>(type->field_count()), std::size(kSamples));
  for (int i = 0; i < type->field_count(); ++i) {
    const std::string& name = type->field(i)->name();
    EXPECT_NE(Find(name), nullptr) << name;
    EXPECT_TRUE(std::any_of(std::begin(kSamples), std::end(kSamples), [&](const Sample& sample) {
      return name == sample.field;
    })) << name;
  }
}

// Reading, writing and reading again gives the original message.
TEST(OptionFields, SetFieldsRoundTrip) {
  for (const Sample& sample : kSamples) {
    const v1::AttentionOptions proto = Parse(sample.text);
    Violations violations(4096);
    const AttentionOptions options = ReadOptions(proto, SomeShape(), violations);
    EXPECT_TRUE(violations.empty()) << sample.field;
    v1::AttentionOptions written;
    WriteOptions(options, &written);
    v1::AttentionOptions expected = proto;
    if (!expected.has_softmax_scale()) expected.set_softmax_scale(0.25);  // the resolved default
    EXPECT_EQ(written.SerializeAsString(), expected.SerializeAsString()) << sample.field;
  }
}

TEST(OptionFields, ServedOptionsAreAll) {
  EXPECT_EQ(ServedOptions(),
            (std::vector<std::string>{"softmax_scale", "softcap", "causal", "window", "dropout",
                                      "alibi", "bias", "mask", "segment_ids", "sinks",
                                      "dilation_levels", "deterministic", "compute_dtype"}));
}

// The options that a device may lack and this request uses.
TEST(OptionFields, DeviceOptionsAreTheScoreTermsDilationOrderAndDType) {
  EXPECT_EQ(DeviceOptions(),
            (std::vector<std::string>{"dropout", "alibi", "bias", "mask", "segment_ids",
                                      "dilation_levels", "deterministic", "compute_dtype"}));
  for (const Sample& sample : kSamples) {
    Violations violations(4096);
    const AttentionOptions options = ReadOptions(Parse(sample.text), SomeShape(), violations);
    const bool of_device = Find(sample.field)->of_device != nullptr;
    EXPECT_EQ(DeviceOptionsOf(options),
              of_device ? std::vector<std::string>{sample.field} : std::vector<std::string>{});
    const bool has_one = HasScoreTerms(options) || options.deterministic ||
                         !options.dilation_levels.empty() ||
                         options.compute_dtype != ComputeDType::kAsInputs;
    EXPECT_EQ(has_one, of_device) << sample.field;
  }
}

// A level with all its fields, and when a single level is dropped.
TEST(OptionFields, OneLevelOfEverythingIsNone) {
  AttentionShape shape = SomeShape();
  shape.num_heads = 3;
  shape.cu_seqlens_q = shape.cu_seqlens_k = {0, 40, 100};
  const auto levels = [&](const std::string& text) {
    Violations violations(4096);
    const AttentionOptions options = ReadOptions(Parse(text), shape, violations);
    EXPECT_TRUE(violations.empty()) << text;
    return options.dilation_levels;
  };
  // Below the largest meaningful rate, with no selected token: neither an error nor an overflow.
  const auto far = levels(
      "dilation_levels { segment_length: 60 dilation_rate: 9223372036854775808 "
      "offset: 9223372036854775807 }");
  ASSERT_EQ(far.size(), 1u);
  EXPECT_LT(*far[0].offset, far[0].dilation_rate);
  const std::string whole = "dilation_levels { segment_length: 60 dilation_rate: 1 }";
  EXPECT_TRUE(levels(whole).empty());
  EXPECT_EQ(levels(whole + whole).size(), 2u);
  EXPECT_EQ(levels("dilation_levels { segment_length: 59 dilation_rate: 1 }").size(), 1u);
  EXPECT_EQ(levels("dilation_levels { segment_length: 60 dilation_rate: 1 head_end: 2 }").size(),
            1u);
  const std::vector<DilationLevel> one = levels(
      "dilation_levels { segment_length: 18446744073709551615 dilation_rate: 2 head_begin: 1 }");
  ASSERT_EQ(one.size(), 1u);
  EXPECT_EQ(one[0], (DilationLevel{int64_t{1} << 40, 2, std::nullopt, 1, 3}));
}

TEST(OptionFields, TooManyLevelsAreNotRead) {
  v1::AttentionOptions proto;
  for (int i = 0; i < 65; ++i) proto.add_dilation_levels();  // each of them invalid
  Violations violations(4096);
  EXPECT_TRUE(ReadOptions(proto, SomeShape(), violations).dilation_levels.empty());
  const Rejection rejection = std::move(violations).ToRejection();
  EXPECT_EQ(rejection.code, absl::StatusCode::kResourceExhausted);
  ASSERT_EQ(rejection.violations.size(), 1u);
  EXPECT_EQ(rejection.violations[0].field, "options.dilation_levels");
}

// A rate is rounded to the nearest multiple of 2^-16; a rate of 0 means no dropout.
TEST(OptionFields, RatesAreQuantised) {
  const auto threshold = [](const std::string& rate) {
    Violations violations(4096);
    const AttentionOptions options =
        ReadOptions(Parse("dropout { seed: 3 rate: " + rate + " }"), SomeShape(), violations);
    EXPECT_TRUE(violations.empty()) << rate;
    return options.dropout;
  };
  EXPECT_EQ(threshold("0.1").threshold, 6554u);
  EXPECT_EQ(threshold("0.99998").threshold, 65535u);
  EXPECT_EQ(threshold("0"), DropoutForm());
  EXPECT_EQ(threshold("1e-9"), DropoutForm());
}

}  // namespace
}  // namespace ringattn
