// Which columns of a range a row sees (attention_params.h).
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_BAND_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_BAND_CUH_

#include <cstdint>

#include "worker/kernels/cuda/plan/attention_params.h"

namespace ringattn::worker::cuda {

__device__ __forceinline__ int64_t FloorDivide(int64_t a, int64_t b) {
  const int64_t quotient = a / b;
  return quotient - (a % b != 0 && a < 0);
}

// Columns [*lower, *upper] that row r of the range sees (before the range's end).
__device__ __forceinline__ void RowLimits(const BandLimits& limits, int row, int* lower,
                                          int* upper) {
  if (limits.same_stride) {
    *lower = limits.first_lower + row;
    *upper = limits.first_upper + row;
    return;
  }
  constexpr int64_t kLimit = int64_t{1} << 30;
  const int64_t low = -FloorDivide(-(limits.lower_base + limits.q_stride * row), limits.k_stride);
  const int64_t high = FloorDivide(limits.upper_base + limits.q_stride * row, limits.k_stride);
  *lower = static_cast<int>(low < -kLimit ? -kLimit : low > kLimit ? kLimit : low);
  *upper = static_cast<int>(high < -kLimit ? -kLimit : high > kLimit ? kLimit : high);
}

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_BAND_CUH_
