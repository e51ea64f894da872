#include "client/tensor_bytes.h"

#include "absl/strings/str_cat.h"

namespace ringattn::client {

const char* TensorIdName(v1::TensorId tensor) {
  constexpr const char* kNames[] = {"?", "q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv"};
  return tensor >= 0 && tensor < 10 ? kNames[tensor] : "?";
}

std::vector<uint64_t> TensorDimensions(const v1::AttentionShape& shape, v1::TensorId tensor) {
  const uint64_t heads = shape.num_heads();
  const uint64_t kv_heads = KvHeads(shape);
  const uint64_t dim = shape.head_dim();
  const uint64_t dim_v = HeadDimV(shape);
  std::vector<uint64_t> dimensions;
  if (!shape.has_packed()) dimensions.push_back(shape.batch());
  const auto append = [&](uint64_t a, uint64_t b, uint64_t c) {
    dimensions.insert(dimensions.end(), {a, b, c});
  };
  switch (tensor) {
    case v1::TENSOR_ID_Q:
    case v1::TENSOR_ID_DQ:
      append(shape.seq_len_q(), heads, dim);
      break;
    case v1::TENSOR_ID_K:
    case v1::TENSOR_ID_DK:
      append(shape.seq_len_kv(), kv_heads, dim);
      break;
    case v1::TENSOR_ID_V:
    case v1::TENSOR_ID_DV:
      append(shape.seq_len_kv(), kv_heads, dim_v);
      break;
    case v1::TENSOR_ID_OUT:
    case v1::TENSOR_ID_DOUT:
      append(shape.seq_len_q(), heads, dim_v);
      break;
    case v1::TENSOR_ID_LSE:
      dimensions.insert(dimensions.end(), {heads, shape.seq_len_q()});
      break;
    default:
      break;
  }
  return dimensions;
}

absl::StatusOr<uint64_t> TensorBytes(const v1::AttentionShape& shape, v1::DataType dtype,
                                     v1::TensorId tensor) {
  uint64_t bytes = 0;
  switch (tensor == v1::TENSOR_ID_LSE ? v1::DATA_TYPE_FLOAT32 : dtype) {
    case v1::DATA_TYPE_FLOAT32:
      bytes = 4;
      break;
    case v1::DATA_TYPE_BFLOAT16:
    case v1::DATA_TYPE_FLOAT16:
      bytes = 2;
      break;
    default:
      return absl::InvalidArgumentError("dtype is not set");
  }
  for (const uint64_t dimension : TensorDimensions(shape, tensor)) {
    if (__builtin_mul_overflow(bytes, dimension, &bytes)) {
      return absl::InvalidArgumentError(
          absl::StrCat("shape: the size of ", TensorIdName(tensor), " overflows"));
    }
  }
  return bytes;
}

}  // namespace ringattn::client
