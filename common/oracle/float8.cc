#include "common/oracle/float8.h"

#include <algorithm>
#include <cmath>

#include "common/oracle/numeric.h"

namespace ringattn::oracle {
namespace {

// Returns the smallest power of two, at least 2^-100, with largest <= 448 * scale.
double ScaleOf(double largest) {
  if (largest == 0.0) return 1.0;
  double scale = 0x1p-100;
  while (largest > 448.0 * scale) scale *= 2.0;
  return scale;
}

}  // namespace

Float8Scales::Float8Scales(const AttentionSpec& spec, const Inputs& inputs)
    : batch_(spec.shape.batch), kv_heads_(spec.shape.num_kv_heads) {
  if (!IsFloat8(spec)) return;
  const AttentionShape& shape = spec.shape;
  std::vector<double> row(std::max(shape.head_dim, shape.head_dim_v));
  const auto add = [&](const void* data, int64_t tokens, int64_t heads, int64_t dim) {
    std::vector<double> largest(batch_ * kv_heads_, 0.0);
    for (int64_t at = 0; at < batch_ * tokens * heads; ++at) {
      LoadMany(spec.dtype, data, at * dim, dim, row.data());
      double& most = largest[at / (tokens * heads) * kv_heads_ + at % heads / (heads / kv_heads_)];
      for (int64_t d = 0; d < dim; ++d) {
        if (std::isfinite(row[d])) most = std::max(most, std::abs(row[d]));
      }
    }
    for (const double most : largest) scales_.push_back(ScaleOf(most));
  };
  add(inputs.q, shape.seq_len_q, shape.num_heads, shape.head_dim);
  add(inputs.k, shape.seq_len_kv, shape.num_kv_heads, shape.head_dim);
  add(inputs.v, shape.seq_len_kv, shape.num_kv_heads, shape.head_dim_v);
}

double Float8Scales::Of(TensorId tensor, int64_t batch, int64_t kv_head) const {
  if (scales_.empty()) return 0.0;
  const int64_t index = tensor == TensorId::kQ ? 0 : tensor == TensorId::kK ? 1 : 2;
  return scales_[(index * batch_ + batch) * kv_heads_ + kv_head];
}

}  // namespace ringattn::oracle
