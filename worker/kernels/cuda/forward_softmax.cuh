// What every tensor-core forward kernel does to the scores of a tile that its warp
// holds as m16n8 accumulators: float[m16 row tiles][n8 key tiles][4], of which lane l
// has rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_FORWARD_SOFTMAX_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_FORWARD_SOFTMAX_CUH_

#include "worker/kernels/cuda/device_primitives.cuh"

namespace ringattn::worker::cuda {

// log2: how far a score may exceed the offset of its row's probabilities.
inline constexpr float kOffsetHeadroom = 8.0f;

// Scores that are no longer raw: with a softcap, or with a scale that is not
// positive (the maximum must be taken after it). In log2 units afterwards.
template <int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void TransformScores(float (&scores)[kRowTiles][kKeyTiles][4],
                                                const CommonParams& common) {
  const float cap = common.softcap;
  const float inner = cap > 0.0f ? common.softmax_scale / cap : 0.0f;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[m][n][i] = cap > 0.0f ? cap * kLog2E * Tanh(scores[m][n][i] * inner)
                                     : scores[m][n][i] * common.scale_log2;
      }
    }
  }
}

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

// Natural logarithm of a row's sum of exponentials; -inf if it saw no key.
__device__ __forceinline__ float RowLse(float offset, float sum) {
  return sum == 0.0f ? NegativeInfinity() : (offset + log2f(sum)) * kLn2;
}

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_FORWARD_SOFTMAX_CUH_
