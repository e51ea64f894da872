#include "common/wire/proto_values.h"

#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "google/protobuf/descriptor.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

// Every value of the proto enum, except `without`, has exactly one counterpart.
template <typename Enum>
void ExpectRoundTrips(const std::set<Enum>& without = {}) {
  const google::protobuf::EnumDescriptor* type = google::protobuf::GetEnumDescriptor<Enum>();
  for (int i = 0; i < type->value_count(); ++i) {
    const Enum proto = static_cast<Enum>(type->value(i)->number());
    const auto value = FromProto(proto);
    EXPECT_EQ(value.has_value(), proto != 0 && without.count(proto) == 0)
        << type->value(i)->full_name();
    if (!value.has_value()) continue;
    EXPECT_EQ(ToProto(*value), proto) << type->value(i)->full_name();
  }
  EXPECT_FALSE(FromProto(static_cast<Enum>(77)).has_value()) << type->full_name();
}

TEST(ProtoValues, EnumsRoundTrip) {
  // Only masks and ids use these; kernels do not compute with them.
  ExpectRoundTrips<v1::DataType>({v1::DATA_TYPE_INT32, v1::DATA_TYPE_UINT8});
  ExpectRoundTrips<v1::Layout>();
  ExpectRoundTrips<v1::Schedule>();
}

TEST(ProtoValues, TensorIdsAreNumberedAlike) {
  const google::protobuf::EnumDescriptor* type = v1::TensorId_descriptor();
  EXPECT_EQ(static_cast<size_t>(type->value_count()) - 1, AllTensors().size());
  for (const TensorInfo& info : AllTensors()) {
    const auto* value = type->FindValueByNumber(ToProto(info.id));
    ASSERT_NE(value, nullptr) << info.name;
    EXPECT_EQ(absl::AsciiStrToLower(value->name()), absl::StrCat("tensor_id_", info.name));
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

}  // namespace
}  // namespace ringattn
