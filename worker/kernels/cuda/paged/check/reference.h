// The fp64 reference of the paged kernels: plain loops over entries, which share no code with them.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PAGED_CHECK_REFERENCE_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PAGED_CHECK_REFERENCE_H_

#include <cstdint>
#include <functional>
#include <vector>

namespace ringattn::worker::cuda::paged::check {

// One query of one head, and what it may see.
struct ReferenceQuery {
  const float* q = nullptr;  // [head_dim]
  int64_t position = 0;
  int64_t length = 0;  // entries of the sequence in the cache
  // The cache holds part `part` of `parts`: blocks of block_tokens entries in turn.
  int64_t parts = 1, part = 0, block_tokens = 1;
  bool causal = true;
  int64_t window_left = -1;
  double softmax_scale = 1.0;
  double softcap = 0.0;
  bool has_sink = false;
  double sink = 0.0;
};

// Calls visit(k, v) with the entry's key [head_dim] and value [head_dim_v] of the query's kv head.
using ReadEntry = std::function<void(int64_t entry, const float** k, const float** v)>;

struct ReferenceRow {
  std::vector<double> out;  // [head_dim_v]
  double lse = 0.0;         // -inf without keys and sink
  // What error bounds need: sums of |v| weighted by the probabilities; of |v| over all visible
  // entries, divided by the sum of exponentials relative to the largest score; the largest
  // sum of |q k| times the scale.
  std::vector<double> weighted_abs;
  std::vector<double> scaled_abs;
  double largest_product = 0.0;
};

ReferenceRow ComputeReference(const ReferenceQuery& query, int64_t head_dim, int64_t head_dim_v,
                              const ReadEntry& read);

}  // namespace ringattn::worker::cuda::paged::check

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PAGED_CHECK_REFERENCE_H_
