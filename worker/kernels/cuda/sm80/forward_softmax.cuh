// What every tensor-core forward kernel does to the scores of a tile that its warp
// holds as m16n8 accumulators: float[m16 row tiles][n8 key tiles][4], of which lane l
// has rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_SOFTMAX_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_SOFTMAX_CUH_

#include "worker/kernels/cuda/attention_params.h"
#include "worker/kernels/cuda/primitives/band.cuh"
#include "worker/kernels/cuda/primitives/numerics.cuh"
#include "worker/kernels/cuda/score_rule.cuh"

namespace ringattn::worker::cuda::sm80 {

// log2: how far a score may exceed the offset of its row's probabilities.
inline constexpr float kOffsetHeadroom = 8.0f;

// The score rule (score_rule.cuh). With a positive scale alone scores stay raw, and the scale is
// folded into the exponent; with a softcap, or with a scale that is not positive (the maximum
// must be taken after it), they are put into log2 units first.
struct Transform {
  bool applies;      // to every score, before the mask
  float multiplier;  // from what scores are then to log2 units; > 0

  explicit __device__ __forceinline__ Transform(const CommonParams& common)
      : applies(common.softcap > 0.0f || common.scale_log2 <= 0.0f),
        multiplier(applies ? 1.0f : common.scale_log2) {}

  // REQUIRES: applies.
  template <int kRowTiles, int kKeyTiles>
  __device__ __forceinline__ void Apply(float (&scores)[kRowTiles][kKeyTiles][4],
                                        const CommonParams& common) const {
    const Softcap cap(common);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          scores[m][n][i] = common.softcap > 0.0f ? cap.Score(cap.Tangent(scores[m][n][i]))
                                                  : scores[m][n][i] * common.scale_log2;
        }
      }
    }
  }
};

// `row` is the lane's first row in the tile; `column` its first column, counted from
// the range's first key. Groups of 16 columns lie kGroupStep apart.
template <int kGroupStep, int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void MaskScores(float (&scores)[kRowTiles][kKeyTiles][4],
                                           const KvRange& range, int row, int column,
                                           int head_pack) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int packed_row = row + m * 16 + half * 8;
      int lower, upper;
      RowLimits(range.limits, head_pack == 1 ? packed_row : packed_row / head_pack, &lower, &upper);
      upper = min(upper, range.row_count - 1);
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = column + n / 2 * kGroupStep + n % 2 * 8 + i;
          if (at < lower || at > upper) scores[m][n][half * 2 + i] = NegativeInfinity();
        }
      }
    }
  }
}

// What a row's probabilities are relative to, exp2(base), once its maximum is `max`. Ordinary rows
// keep it as the offset that the exponent's multiply-add subtracts. Of wide rows (score_rule.cuh),
// whose exact products would leave a rounded offset far behind, scores have it subtracted first
// (SubtractBases): their offset is 0, and their limit is the maximum itself.
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

  // The base of a row with this limit and offset.
  static __device__ __forceinline__ float Of(float limit, float offset, float multiplier) {
    return offset == 0.0f && IsWide(limit * multiplier) && limit != NegativeInfinity()
               ? WideScore(limit, multiplier)
               : offset;
  }
};

// Turns the scores of one m16n8 tile into probabilities exp2(score * multiplier -
// offset), rounded for the tensor cores: half `n` (0 or 1) of the A fragment `p`.
// Adds them to the lane's sums of its two rows.
template <typename T>
__device__ __forceinline__ void Exponentials(const float (&scores)[4], int n, float multiplier,
                                             const float (&offset)[2], float (&sum)[2],
                                             uint32_t (&p)[4]) {
  float e[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) e[i] = Exp2(fmaf(scores[i], multiplier, -offset[i / 2]));
  sum[0] += e[0] + e[1];
  sum[1] += e[2] + e[3];
  p[2 * n] = Pack<T>(e[0], e[1]);
  p[2 * n + 1] = Pack<T>(e[2], e[3]);
}

template <int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void ClearAccumulators(float (&acc)[kRowTiles][kColumnTiles][4]) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[m][n][i] = 0.0f;
    }
  }
}

// Sums over the four lanes that share a row.
__device__ __forceinline__ float QuadSum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// Natural logarithm of a row's sum of exponentials, relative to exp2(base); -inf if it saw no key.
__device__ __forceinline__ float RowLse(float base, float sum) {
  return sum == 0.0f ? NegativeInfinity() : (base + log2f(sum)) * kLn2;
}

}  // namespace ringattn::worker::cuda::sm80

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_SOFTMAX_CUH_
