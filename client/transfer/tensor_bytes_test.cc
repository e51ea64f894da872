#include "client/transfer/tensor_bytes.h"

#include <google/protobuf/text_format.h>

#include <string>

#include "gtest/gtest.h"

namespace ringattn::client {
namespace {

constexpr v1::DataType kBFloat16 = v1::DATA_TYPE_BFLOAT16;

v1::AttentionShape Shape(const std::string& packed) {
  v1::AttentionShape shape;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(
      "batch: 1 seq_len_q: 8 seq_len_kv: 8 num_heads: 2 head_dim: 16 " + packed, &shape));
  return shape;
}

std::string ErrorOf(const v1::AttentionShape& shape, const TensorTypes& types,
                    v1::TensorId tensor = v1::TENSOR_ID_Q) {
  const absl::Status status = TensorBytes(shape, types, tensor).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  return std::string(status.message());
}

TEST(TensorBytesTest, DocumentsGiveTheSizesOfPackedTensors) {
  const v1::AttentionShape shape =
      Shape("packed { cu_seqlens_q: [0, 3, 3, 8] cu_seqlens_k: [0, 4, 8, 8] }");
  EXPECT_EQ(*TensorBytes(shape, kBFloat16, v1::TENSOR_ID_Q), 8u * 2 * 16 * 2);
  EXPECT_EQ(*TensorBytes(shape, kBFloat16, v1::TENSOR_ID_LSE), 2u * 8 * 4);
}

TEST(TensorBytesTest, ErrorsNameTheOffsetAndWhatItMayBe) {
  EXPECT_EQ(
      ErrorOf(Shape("packed { cu_seqlens_q: [0, 5, 3, 8] cu_seqlens_k: [0, 4, 8, 8] }"), kBFloat16),
      "shape.packed.cu_seqlens_q[2]: is 3, must be at least the offset before it, 5");
  EXPECT_EQ(ErrorOf(Shape("packed { cu_seqlens_q: [0, 8] cu_seqlens_k: [4, 0] }"), kBFloat16),
            "shape.packed.cu_seqlens_k[1]: is 0, must be at least the offset before it, 4");
}

TEST(TensorBytesTest, ErrorsListTheAcceptedValues) {
  const v1::AttentionShape shape = Shape("packed { cu_seqlens_q: [0, 8] cu_seqlens_k: [0, 8] }");
  EXPECT_EQ(ErrorOf(shape, v1::DATA_TYPE_UNSPECIFIED),
            "dtype: is not set, must be DATA_TYPE_FLOAT32, DATA_TYPE_BFLOAT16 or "
            "DATA_TYPE_FLOAT16");
  EXPECT_EQ(ErrorOf(shape, kBFloat16, static_cast<v1::TensorId>(99)).substr(0, 44),
            "tensor: is 99, must be TENSOR_ID_Q, TENSOR_I");
  v1::ProbabilityRow row;
  row.set_batch(1);
  EXPECT_EQ(ErrorOf(shape, TensorTypes(kBFloat16, kBFloat16, v1::LSE_FORMAT_UNSPECIFIED, {row})),
            "probability_rows: batch is 1, must be less than the number of documents, 1");
}

}  // namespace
}  // namespace ringattn::client
