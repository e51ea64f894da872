// What calls for a bias's gradient store of it whatever stood there, by rows: the rest is to be
// zeroed before. Pure host arithmetic.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_STORED_ROWS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_STORED_ROWS_H_

#include <cstdint>
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
// queries; none where positions are not consecutive.
std::vector<StoredRows> StoredRowsOf(const std::vector<const BiasGradientCall*>& calls);

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_STORED_ROWS_H_
