// The rows of a bias's gradient that calls store completely, overwriting earlier values. The
// remaining elements must be zeroed first. Pure host arithmetic.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PLAN_STORED_ROWS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PLAN_STORED_ROWS_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "worker/kernels/attention_kernel.h"

namespace ringattn::worker::cuda {

// For each r in [0, count): columns [first + r, end + r) of row begin + r, restricted to [low,
// high).
struct StoredRows {
  int64_t begin = 0;
  int64_t count = 0;
  int64_t first = 0;
  int64_t end = 0;
  int64_t low = 0;
  int64_t high = 0;
};

// Returns a subset of the elements that the calls store, in every plane of one gradient: at most
// one entry per piece of the queries, and none where positions are not consecutive. If the bias is
// sharded by keys, the rows are those of all calls, each with some columns.
std::vector<StoredRows> StoredRowsOf(const std::vector<const BiasGradientCall*>& calls);

// A bias's gradient [planes, rows, columns], partly stored by calls.
struct PartlyStored {
  int64_t planes = 0;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t element_bytes = 0;
  std::vector<StoredRows> stored;  // in every plane; the rest must be zeroed
};

// Returns the elements that `zero` may skip because the calls `behind`, which run after it, store
// them in the same gradient. Returns no value if all elements must be zeroed: the calls have no
// bias, their gradient has another size, or no element is certain to be stored.
std::optional<PartlyStored> PartlyStoredOf(const ZeroCall& zero,
                                           const std::vector<const BiasGradientCall*>& behind);

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PLAN_STORED_ROWS_H_
