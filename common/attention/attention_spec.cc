#include "common/attention/attention_spec.h"

#include <cassert>

namespace ringattn {
namespace {

bool IsOnKvAxis(TensorId id) {
  return id == TensorId::kK || id == TensorId::kV || id == TensorId::kDk || id == TensorId::kDv;
}

bool HasValueDim(TensorId id) {
  return id == TensorId::kV || id == TensorId::kDv || id == TensorId::kOut || id == TensorId::kDout;
}

}  // namespace

const char* TensorName(TensorId id) {
  switch (id) {
    case TensorId::kQ:
      return "q";
    case TensorId::kK:
      return "k";
    case TensorId::kV:
      return "v";
    case TensorId::kOut:
      return "out";
    case TensorId::kLse:
      return "lse";
    case TensorId::kDout:
      return "dout";
    case TensorId::kDq:
      return "dq";
    case TensorId::kDk:
      return "dk";
    case TensorId::kDv:
      return "dv";
  }
  assert(false && "unknown TensorId");
  return "";
}

DType DTypeOf(const AttentionSpec& spec, TensorId id) {
  return id == TensorId::kLse ? DType::kFloat32 : spec.dtype;
}

TensorLayout LayoutOf(const AttentionSpec& spec, TensorId id) {
  const AttentionShape& shape = spec.shape;
  const int64_t element_bytes = ElementBytes(DTypeOf(spec, id));
  TensorLayout layout;
  layout.on_kv_axis = IsOnKvAxis(id);
  layout.rows = layout.on_kv_axis ? shape.seq_len_kv : shape.seq_len_q;
  if (id == TensorId::kLse) {
    layout.outer = shape.batch * shape.num_heads;
    layout.inner_bytes = element_bytes;
    return layout;
  }
  const int64_t heads = layout.on_kv_axis ? shape.num_kv_heads : shape.num_heads;
  const int64_t dim = HasValueDim(id) ? shape.head_dim_v : shape.head_dim;
  layout.outer = shape.batch;
  layout.inner_bytes = heads * dim * element_bytes;
  return layout;
}

std::vector<int64_t> DimensionsOf(const AttentionSpec& spec, TensorId id) {
  const AttentionShape& shape = spec.shape;
  std::vector<int64_t> dimensions;
  if (!shape.packed) dimensions.push_back(shape.batch);
  if (id == TensorId::kLse) {
    dimensions.push_back(shape.num_heads);
    dimensions.push_back(shape.seq_len_q);
    return dimensions;
  }
  const bool on_kv_axis = IsOnKvAxis(id);
  dimensions.push_back(on_kv_axis ? shape.seq_len_kv : shape.seq_len_q);
  dimensions.push_back(on_kv_axis ? shape.num_kv_heads : shape.num_heads);
  dimensions.push_back(HasValueDim(id) ? shape.head_dim_v : shape.head_dim);
  return dimensions;
}

}  // namespace ringattn
