// The online softmax of one row, as every tensor-core forward keeps it: the base that its
// probabilities are relative to, and what becomes of it at the end.
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

// What a row's probabilities are relative to, exp2(base), once its maximum is `max`. Ordinary rows
// keep it as the offset that the exponent's multiply-add subtracts. Wide rows (score_rule.cuh),
// whose exact products would leave a rounded offset far behind, have their limit, the maximum
// itself, subtracted from their scores before that, and an offset of 0. `multiplier` is > 0;
// `headroom` is kOffsetHeadroom / multiplier.
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

  // Of a row with this limit and offset. (Of an ordinary one with an offset of 0 the limit is the
  // headroom.)
  static __device__ __forceinline__ bool Wide(float limit, float offset, float multiplier) {
    return offset == 0.0f && IsWide(limit * multiplier) && limit != NegativeInfinity();
  }
  static __device__ __forceinline__ float Of(float limit, float offset, float multiplier) {
    return Wide(limit, offset, multiplier) ? WideScore(limit, multiplier) : offset;
  }

  // What a row of this limit and offset has is to be multiplied with to become relative to this
  // base.
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
