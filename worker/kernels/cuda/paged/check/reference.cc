#include "worker/kernels/cuda/paged/check/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace ringattn::worker::cuda::paged::check {

ReferenceRow ComputeReference(const ReferenceQuery& query, int64_t head_dim, int64_t head_dim_v,
                              const ReadEntry& read) {
  constexpr double kNone = -std::numeric_limits<double>::infinity();
  ReferenceRow row;
  row.out.assign(head_dim_v, 0.0);
  row.weighted_abs.assign(head_dim_v, 0.0);
  row.scaled_abs.assign(head_dim_v, 0.0);
  std::vector<double> scores;
  std::vector<int64_t> entries;
  double largest = kNone;
  for (int64_t j = 0; j < query.length; ++j) {
    const int64_t block = j / query.block_tokens * query.parts + query.part;
    const int64_t place = block * query.block_tokens + j % query.block_tokens;
    if (query.causal && place > query.position) continue;
    if (query.window_left >= 0 && place < query.position - query.window_left) continue;
    const float *k = nullptr, *v = nullptr;
    read(j, &k, &v);
    double dot = 0.0, absolute = 0.0;
    for (int64_t d = 0; d < head_dim; ++d) {
      const double product = double{query.q[d]} * double{k[d]};
      dot += product;
      absolute += std::fabs(product);
    }
    double score = query.softmax_scale * dot;
    if (query.softcap > 0.0) score = query.softcap * std::tanh(score / query.softcap);
    row.largest_product = std::max(row.largest_product, absolute * std::fabs(query.softmax_scale));
    largest = std::max(largest, score);
    scores.push_back(score);
    entries.push_back(j);
  }
  double sum = 0.0;
  for (const double score : scores) sum += std::exp(score - largest);
  row.lse = scores.empty() ? kNone : largest + std::log(sum);
  if (query.has_sink) {
    const double top = std::max(row.lse, query.sink);
    row.lse =
        top == kNone ? kNone : top + std::log(std::exp(row.lse - top) + std::exp(query.sink - top));
  }
  for (size_t i = 0; i < entries.size(); ++i) {
    const float *k = nullptr, *v = nullptr;
    read(entries[i], &k, &v);
    const double p = std::exp(scores[i] - row.lse);
    for (int64_t d = 0; d < head_dim_v; ++d) {
      row.out[d] += p * double{v[d]};
      row.weighted_abs[d] += p * std::fabs(double{v[d]});
      row.scaled_abs[d] += std::fabs(double{v[d]}) / sum;
    }
  }
  return row;
}

}  // namespace ringattn::worker::cuda::paged::check
