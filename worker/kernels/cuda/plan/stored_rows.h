// What calls for a bias's gradient store of it whatever stood there, by rows: the rest is to be
// zeroed before. Pure host arithmetic.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PLAN_STORED_ROWS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PLAN_STORED_ROWS_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "worker/kernels/attention_kernel.h"

namespace ringattn::worker::cuda {

// Of row begin + r, for r in [0, count), the columns [first + r, end + r), as far as they lie in
// [low, high).
struct StoredRows {
  int64_t begin = 0;
  int64_t count = 0;
  int64_t first = 0;
  int64_t end = 0;
  int64_t low = 0;
  int64_t high = 0;
};

// Some of what the calls, in every plane of one gradient, store. At most one for each piece of the
// queries; none where positions are not consecutive. Where the bias is cut by keys, rows are those
// of all calls, of each of which some columns.
std::vector<StoredRows> StoredRowsOf(const std::vector<const BiasGradientCall*>& calls);

// A bias's gradient [planes, rows, columns], of which calls store some.
struct PartlyStored {
  int64_t planes = 0;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t element_bytes = 0;
  std::vector<StoredRows> stored;  // in every plane; the rest is to be zeroed
};

// What `zero` may leave out, whose target the calls `behind` have as their gradient. Nothing if all
// is to be zeroed: they store nothing for certain, have no bias, or their gradient is of another
// size.
std::optional<PartlyStored> PartlyStoredOf(const ZeroCall& zero,
                                           const std::vector<const BiasGradientCall*>& behind);

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PLAN_STORED_ROWS_H_
