#include "common/wire/proto_values.h"

#include "google/protobuf/descriptor.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

// Every value of the proto enum has one on the other side, and only those.
template <typename Enum>
void ExpectRoundTrips() {
  const google::protobuf::EnumDescriptor* type = google::protobuf::GetEnumDescriptor<Enum>();
  for (int i = 0; i < type->value_count(); ++i) {
    const Enum proto = static_cast<Enum>(type->value(i)->number());
    const auto value = FromProto(proto);
    EXPECT_EQ(value.has_value(), type->value(i)->number() != 0) << type->value(i)->full_name();
    if (!value.has_value()) continue;
    EXPECT_EQ(ToProto(*value), proto) << type->value(i)->full_name();
  }
  EXPECT_FALSE(FromProto(static_cast<Enum>(77)).has_value()) << type->full_name();
}

TEST(ProtoValues, EnumsRoundTrip) {
  ExpectRoundTrips<v1::DataType>();
  ExpectRoundTrips<v1::Layout>();
  ExpectRoundTrips<v1::Schedule>();
}

TEST(ProtoValues, TensorIdsAreNumberedAlike) {
  for (int number = v1::TENSOR_ID_Q; number <= v1::TENSOR_ID_DV; ++number) {
    ASSERT_TRUE(TensorIdFromNumber(number).has_value());
    EXPECT_EQ(ToProto(*TensorIdFromNumber(number)), number);
  }
  for (int number : {-1, 0, v1::TENSOR_ID_DV + 1, 1 << 30}) {
    EXPECT_FALSE(TensorIdFromNumber(number).has_value()) << number;
  }
}

AttentionShape SomeShape() {
  return {.packed = false,
          .batch = 2,
          .seq_len_q = 30,
          .seq_len_kv = 40,
          .num_heads = 6,
          .num_kv_heads = 3,
          .head_dim = 16,
          .head_dim_v = 24,
          .cu_seqlens_q = {0, 30},
          .cu_seqlens_k = {0, 40}};
}

TEST(ProtoValues, ShapesRoundTrip) {
  AttentionShape packed = SomeShape();
  packed.packed = true;
  packed.batch = 1;
  packed.cu_seqlens_q = {0, 10, 10, 30};
  packed.cu_seqlens_k = {0, 5, 35, 40};
  for (const AttentionShape& shape : {SomeShape(), packed}) {
    v1::AttentionShape proto;
    ToProto(shape, &proto);
    EXPECT_EQ(proto.has_packed(), shape.packed);
    const AttentionShape read = FromProto(proto);
    EXPECT_EQ(read.packed, shape.packed);
    EXPECT_EQ(read.batch, shape.batch);
    EXPECT_EQ(read.seq_len_q, 30);
    EXPECT_EQ(read.seq_len_kv, 40);
    EXPECT_EQ(read.num_heads, 6);
    EXPECT_EQ(read.num_kv_heads, 3);
    EXPECT_EQ(read.head_dim, 16);
    EXPECT_EQ(read.head_dim_v, 24);
    EXPECT_EQ(read.cu_seqlens_q, shape.cu_seqlens_q);
    EXPECT_EQ(read.cu_seqlens_k, shape.cu_seqlens_k);
  }
}

TEST(ProtoValues, OptionsRoundTripAndNothingIsSetInVain) {
  v1::AttentionOptions plain;
  ToProto(AttentionOptions{.softmax_scale = 0.5}, &plain);
  EXPECT_FALSE(plain.has_softcap());
  EXPECT_FALSE(plain.has_window());
  const AttentionOptions read_plain = FromProto(plain);
  EXPECT_EQ(read_plain.softmax_scale, 0.5);
  EXPECT_EQ(read_plain.softcap, 0);
  EXPECT_FALSE(read_plain.causal);
  EXPECT_EQ(read_plain.window_left, -1);
  EXPECT_EQ(read_plain.window_right, -1);

  v1::AttentionOptions proto;
  ToProto(AttentionOptions{.softmax_scale = 0.25,
                           .softcap = 30,
                           .causal = true,
                           .window_left = -1,
                           .window_right = 7},
          &proto);
  const AttentionOptions read = FromProto(proto);
  EXPECT_EQ(read.softmax_scale, 0.25);
  EXPECT_EQ(read.softcap, 30);
  EXPECT_TRUE(read.causal);
  EXPECT_EQ(read.window_left, -1);
  EXPECT_EQ(read.window_right, 7);
}

}  // namespace
}  // namespace ringattn
