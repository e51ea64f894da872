#include "common/attention/attention_spec.h"

#include <vector>

#include "gtest/gtest.h"

namespace ringattn {
namespace {

constexpr TensorId kAll[] = {TensorId::kQ,   TensorId::kK,   TensorId::kV,
                             TensorId::kOut, TensorId::kLse, TensorId::kDout,
                             TensorId::kDq,  TensorId::kDk,  TensorId::kDv};

AttentionSpec Example(bool packed) {
  AttentionSpec spec;
  spec.dtype = DType::kBFloat16;
  spec.shape = {packed, packed ? 1 : 3, 10, 14, 6, 2, 5, 7, {0, 10}, {0, 14}};
  return spec;
}

TEST(AttentionSpecTest, BytesAgreeWithDimensions) {
  for (bool packed : {false, true}) {
    const AttentionSpec spec = Example(packed);
    for (TensorId id : kAll) {
      int64_t bytes = ElementBytes(DTypeOf(spec, id));
      for (int64_t dimension : DimensionsOf(spec, id)) bytes *= dimension;
      EXPECT_EQ(LayoutOf(spec, id).bytes(), bytes) << TensorName(id);
      EXPECT_EQ(LayoutOf(spec, id).rows, LayoutOf(spec, id).on_kv_axis ? 14 : 10);
    }
  }
}

TEST(AttentionSpecTest, Dimensions) {
  using Dimensions = std::vector<int64_t>;
  const AttentionSpec dense = Example(false);
  EXPECT_EQ(DimensionsOf(dense, TensorId::kQ), (Dimensions{3, 10, 6, 5}));
  EXPECT_EQ(DimensionsOf(dense, TensorId::kDk), (Dimensions{3, 14, 2, 5}));
  EXPECT_EQ(DimensionsOf(dense, TensorId::kV), (Dimensions{3, 14, 2, 7}));
  EXPECT_EQ(DimensionsOf(dense, TensorId::kOut), (Dimensions{3, 10, 6, 7}));
  EXPECT_EQ(DimensionsOf(dense, TensorId::kLse), (Dimensions{3, 6, 10}));
  const AttentionSpec packed = Example(true);
  EXPECT_EQ(DimensionsOf(packed, TensorId::kDv), (Dimensions{14, 2, 7}));
  EXPECT_EQ(DimensionsOf(packed, TensorId::kLse), (Dimensions{6, 10}));
}

TEST(AttentionSpecTest, LseIsFp32) {
  EXPECT_EQ(DTypeOf(Example(false), TensorId::kLse), DType::kFloat32);
  EXPECT_EQ(DTypeOf(Example(false), TensorId::kDq), DType::kBFloat16);
  EXPECT_EQ(LayoutOf(Example(false), TensorId::kLse).outer, 18);
}

}  // namespace
}  // namespace ringattn
