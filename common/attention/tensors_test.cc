#include "common/attention/tensors.h"

#include <vector>

#include "gtest/gtest.h"

namespace ringattn {
namespace {

AttentionSpec Example(bool packed) {
  AttentionSpec spec;
  spec.dtype = DType::kBFloat16;
  spec.shape = {packed, packed ? 1 : 3, 10, 14, 6, 2, 5, 7, {0, 10}, {0, 14}};
  return spec;
}

TEST(TensorsTest, BytesAgreeWithDimensions) {
  for (int form : {0, 1, 2}) {
    AttentionSpec spec = Example(form > 0);
    spec.probability_rows = {{0, 3}, {0, 3}, {0, 9}};
    if (form == 2) {
      spec.shape.cu_seqlens_q = {0, 3, 3, 10};
      spec.shape.cu_seqlens_k = {0, 5, 6, 14};
      spec.lse_per_document = true;
    }
    for (const TensorInfo& info : AllTensors()) {
      const TensorId id = info.id;
      int64_t bytes = HasDType(id)                        ? ElementBytes(DTypeOf(spec, id))
                      : info.element == ElementOf::kInt32 ? 4
                                                          : 1;  // one mask byte
      for (int64_t dimension : DimensionsOf(spec, id)) bytes *= dimension;
      EXPECT_EQ(BytesOf(spec, id), bytes) << TensorName(id);
      if (!IsPerDocument(spec, id)) {
        EXPECT_EQ(LayoutOf(spec, id).bytes(), bytes);
      }
      if (info.form == TensorForm::kPerHead || info.form == TensorForm::kChosenRows) continue;
      EXPECT_EQ(LayoutOf(spec, id).rows, info.axis == Axis::kKv ? 14 : 10);
    }
  }
}

TEST(TensorsTest, Dimensions) {
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
  EXPECT_EQ(DimensionsOf(packed, TensorId::kDlse), (Dimensions{6, 10}));
  EXPECT_EQ(DimensionsOf(packed, TensorId::kSinks), (Dimensions{6}));
  EXPECT_EQ(DimensionsOf(dense, TensorId::kDsinks), (Dimensions{6}));
}

TEST(TensorsTest, LseIsFp32) {
  EXPECT_EQ(DTypeOf(Example(false), TensorId::kLse), DType::kFloat32);
  EXPECT_EQ(DTypeOf(Example(false), TensorId::kDq), DType::kBFloat16);
  EXPECT_EQ(LayoutOf(Example(false), TensorId::kLse).outer, 18);
}

TEST(TensorsTest, UsesByDirection) {
  using Ids = std::vector<TensorId>;
  using T = TensorId;
  const AttentionSpec spec = Example(false);
  EXPECT_EQ(InputsOf(spec, Direction::kForward, false), (Ids{T::kQ, T::kK, T::kV}));
  EXPECT_EQ(OutputsOf(spec, Direction::kForward), (Ids{T::kOut, T::kLse}));
  EXPECT_EQ(InputsOf(spec, Direction::kBackward, false),
            (Ids{T::kQ, T::kK, T::kV, T::kOut, T::kLse, T::kDout}));
  EXPECT_EQ(InputsOf(spec, Direction::kBackward, true), (Ids{T::kQ, T::kK, T::kV, T::kDout}));
  EXPECT_EQ(OutputsOf(spec, Direction::kBackward), (Ids{T::kDq, T::kDk, T::kDv}));
}

// Options and header fields add their tensors and no others.
TEST(TensorsTest, SomeTensorsArePresentWhereTheRequestHasThem) {
  using Ids = std::vector<TensorId>;
  using T = TensorId;
  AttentionSpec spec = Example(false);
  spec.options.sinks = true;
  EXPECT_EQ(InputsOf(spec, Direction::kForward, false), (Ids{T::kQ, T::kK, T::kV, T::kSinks}));
  EXPECT_EQ(OutputsOf(spec, Direction::kForward), (Ids{T::kOut, T::kLse}));
  EXPECT_EQ(InputsOf(spec, Direction::kBackward, true),
            (Ids{T::kQ, T::kK, T::kV, T::kDout, T::kSinks}));
  EXPECT_EQ(OutputsOf(spec, Direction::kBackward), (Ids{T::kDq, T::kDk, T::kDv, T::kDsinks}));
  spec.has_dlse = true;
  EXPECT_EQ(InputsOf(spec, Direction::kForward, false), (Ids{T::kQ, T::kK, T::kV, T::kSinks}));
  EXPECT_EQ(InputsOf(spec, Direction::kBackward, true),
            (Ids{T::kQ, T::kK, T::kV, T::kDout, T::kDlse, T::kSinks}));
}

// Clients send the packed tensor; workers hold its parts.
TEST(TensorsTest, PackedTensorsTravelInPlaceOfTheirParts) {
  using Ids = std::vector<TensorId>;
  using T = TensorId;
  AttentionSpec spec = Example(false);
  spec.options.sinks = true;
  spec.shape.head_dim_v = spec.shape.head_dim;
  spec.shape.packing = Packing::kKv;
  EXPECT_EQ(InputsOf(spec, Direction::kForward, false), (Ids{T::kQ, T::kSinks, T::kKv}));
  EXPECT_EQ(ShardInputsOf(spec, Direction::kForward, false), (Ids{T::kQ, T::kK, T::kV, T::kSinks}));
  EXPECT_EQ(OutputsOf(spec, Direction::kBackward), (Ids{T::kDq, T::kDsinks, T::kDkv}));
  EXPECT_EQ(ShardOutputsOf(spec, Direction::kBackward), (Ids{T::kDq, T::kDk, T::kDv, T::kDsinks}));
  EXPECT_EQ(ClientTensorOf(spec, T::kDv), T::kDkv);
  EXPECT_EQ(ClientTensorOf(spec, T::kQ), T::kQ);
  EXPECT_EQ(DimensionsOf(spec, T::kKv), (std::vector<int64_t>{3, 14, 2, 2, 5}));
  EXPECT_EQ(PartsOf(T::kDkv), (Ids{T::kDk, T::kDv}));
  EXPECT_EQ(PartsOf(T::kLse), (Ids{T::kLse}));

  spec.shape.packing = Packing::kQkv;
  spec.shape.num_kv_heads = spec.shape.num_heads;
  EXPECT_EQ(InputsOf(spec, Direction::kBackward, true), (Ids{T::kDout, T::kSinks, T::kQkv}));
  EXPECT_EQ(OutputsOf(spec, Direction::kBackward), (Ids{T::kDsinks, T::kDqkv}));
  EXPECT_EQ(DimensionsOf(spec, T::kDqkv), (std::vector<int64_t>{3, 10, 3, 6, 5}));
  EXPECT_EQ(DTypeOf(spec, T::kQkv), DType::kBFloat16);
}

TEST(TensorsTest, ProbabilitiesHaveTheColumnsOfTheirRowsDocuments) {
  AttentionSpec spec = Example(true);
  spec.shape.cu_seqlens_q = {0, 3, 3, 10};
  spec.shape.cu_seqlens_k = {0, 5, 6, 14};
  EXPECT_EQ(OutputsOf(spec, Direction::kForward).size(), 2u);
  spec.probability_rows = {{0, 1}, {0, 2}};
  EXPECT_EQ(OutputsOf(spec, Direction::kForward).back(), TensorId::kProbabilities);
  EXPECT_EQ(OutputsOf(spec, Direction::kBackward).size(), 3u);
  EXPECT_EQ(DimensionsOf(spec, TensorId::kProbabilities), (std::vector<int64_t>{2, 6, 5}));
  spec.probability_rows.push_back({2, 6});
  EXPECT_EQ(DimensionsOf(spec, TensorId::kProbabilities), (std::vector<int64_t>{3, 6, 8}));
  EXPECT_EQ(LayoutOf(spec, TensorId::kProbabilities).rows, 3);
  EXPECT_EQ(DTypeOf(spec, TensorId::kProbabilities), DType::kFloat32);
}

TEST(TensorsTest, LsePerDocument) {
  AttentionSpec spec = Example(true);
  spec.shape.cu_seqlens_q = {0, 3, 3, 10};
  spec.shape.cu_seqlens_k = {0, 5, 6, 14};
  spec.lse_per_document = true;
  EXPECT_EQ(DimensionsOf(spec, TensorId::kLse), (std::vector<int64_t>{3, 6, 7}));
  EXPECT_EQ(BytesOf(spec, TensorId::kDlse), 3 * 6 * 7 * 4);
  EXPECT_EQ(LayoutOf(spec, TensorId::kLse).bytes(), 6 * 10 * 4);  // as on workers
  EXPECT_TRUE(IsPerDocument(spec, TensorId::kLse));
  EXPECT_FALSE(IsPerDocument(spec, TensorId::kOut));
}

TEST(TensorsTest, GradientsHaveTheShapeAndPlaceOfWhatTheyAreOf) {
  const AttentionSpec spec = Example(false);
  for (const TensorInfo& info : AllTensors()) {
    if (!info.gradient_of) continue;
    EXPECT_EQ(DimensionsOf(spec, info.id), DimensionsOf(spec, *info.gradient_of)) << info.name;
    // The gradient of a replicated tensor is summed on rank 0.
    const Axis place = InfoOf(*info.gradient_of).axis;
    EXPECT_EQ(info.axis, place == Axis::kReplicated ? Axis::kRankZero : place) << info.name;
  }
}

TEST(TensorsTest, NamesAndNumbers) {
  for (const TensorInfo& info : AllTensors()) {
    EXPECT_EQ(TensorFromName(info.name), info.id);
    EXPECT_EQ(TensorFromNumber(static_cast<int>(info.id)), info.id);
  }
  EXPECT_EQ(TensorFromName("w"), std::nullopt);
  for (int number : {-1, 0, static_cast<int>(AllTensors().size()) + 1}) {
    EXPECT_EQ(TensorFromNumber(number), std::nullopt) << number;
  }
}

TEST(TensorsTest, SizesSaturate) {
  constexpr int64_t kLarge = int64_t{1} << 40;
  EXPECT_EQ(SaturatingProduct({kLarge, kLarge}), kSaturatedBytes);
  EXPECT_EQ(SaturatingProduct({kLarge, kLarge, 0}), 0);
  EXPECT_EQ(SaturatingProduct({0, kLarge, kLarge}), 0);
  EXPECT_EQ(SaturatingProduct({kSaturatedBytes, 1}), kSaturatedBytes);
  EXPECT_EQ(SaturatingProduct({kSaturatedBytes, 3}), kSaturatedBytes);
  EXPECT_EQ(SaturatingProduct({3, 5, 7}), 105);
  AttentionSpec spec = Example(false);
  spec.shape.batch = spec.shape.seq_len_q = spec.shape.num_heads = kLarge;
  EXPECT_EQ(BytesOf(spec, TensorId::kQ), kSaturatedBytes);
  EXPECT_EQ(BytesOf(spec, TensorId::kLse), kSaturatedBytes);
}

}  // namespace
}  // namespace ringattn
