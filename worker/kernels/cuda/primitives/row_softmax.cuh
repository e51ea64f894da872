// The online softmax of one row, shared by all tensor-core forwards: the base of its probabilities
// and the row's final lse.
//
// Probabilities are exp2(score * multiplier - offset). The base moves only when a score exceeds
// the row's limit, 2^8 above it (exact after normalisation), which makes rescaling rare.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_ROW_SOFTMAX_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_ROW_SOFTMAX_CUH_

#include "worker/kernels/cuda/primitives/numerics.cuh"
#include "worker/kernels/cuda/primitives/score_rule.cuh"

namespace ringattn::worker::cuda {

// log2: how far a score may exceed the offset of its row's probabilities.
inline constexpr float kOffsetHeadroom = 8.0f;

// The base of a row's probabilities, exp2(base), when its maximum is `max`. For ordinary rows the
// base is the offset that the exponent's multiply-add subtracts. For wide rows (score_rule.cuh) a
// rounded offset would differ too much from the exact product. Their limit, which is the maximum,
// is subtracted from the scores first, and their offset is 0. `multiplier` is > 0; `headroom` is
// kOffsetHeadroom / multiplier.
struct RowBase {
  float base;  // log2 units
  float offset;
  float limit;

  __device__ __forceinline__ RowBase(float max, float multiplier, float headroom)
      : base(max * multiplier), offset(base), limit(max + headroom) {
    if (!IsWide(base)) return;
    base = WideScore(max, multiplier);
    offset = 0.0f;
    limit = max;
  }

  __device__ __forceinline__ bool wide() const { return offset != base; }

  // Returns whether a row with this limit and offset is wide. An ordinary row with an offset of 0
  // has the headroom as its limit.
  static __device__ __forceinline__ bool Wide(float limit, float offset, float multiplier) {
    return offset == 0.0f && IsWide(limit * multiplier) && limit != NegativeInfinity();
  }
  static __device__ __forceinline__ float Of(float limit, float offset, float multiplier) {
    return Wide(limit, offset, multiplier) ? WideScore(limit, multiplier) : offset;
  }

  // Returns the factor that converts the sums of a row with this limit and offset to this base.
  __device__ __forceinline__ float Factor(float old_limit, float old_offset,
                                          float multiplier) const {
    if (old_limit == NegativeInfinity()) return 0.0f;
    return Exp2(Of(old_limit, old_offset, multiplier) - base);
  }
};

// Sums over the four lanes that share a row.
__device__ __forceinline__ float QuadSum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// Natural logarithm of a row's sum of exponentials, relative to exp2(base); -inf if it saw no key.
__device__ __forceinline__ float RowLse(float base, float sum) {
  return sum == 0.0f ? NegativeInfinity() : (base + log2f(sum)) * kLn2;
}

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_ROW_SOFTMAX_CUH_
