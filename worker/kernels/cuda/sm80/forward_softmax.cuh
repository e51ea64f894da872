// The steps from scores to probabilities that all tensor-core forwards share. A warp holds the
// scores of a tile as m16n8 accumulators: float[m16 row tiles][n8 key tiles][4], of which lane l
// has rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_SOFTMAX_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_SOFTMAX_CUH_

#include "worker/kernels/cuda/plan/attention_params.h"
#include "worker/kernels/cuda/primitives/band.cuh"
#include "worker/kernels/cuda/primitives/numerics.cuh"
#include "worker/kernels/cuda/primitives/row_softmax.cuh"
#include "worker/kernels/cuda/primitives/score_rule.cuh"

namespace ringattn::worker::cuda::sm80 {

// The score rule (score_rule.cuh). With only a positive scale, scores stay raw, and the scale is
// part of the exponent. With a softcap, or with a scale that is not positive (the maximum must then
// be taken after scaling), they are converted to log2 units first.
struct Transform {
  bool applies;      // to every score, before the mask
  float multiplier;  // converts the scores to log2 units; > 0

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

// `row` is the lane's first row in the tile; `column` its first column, relative to the range's
// first key. Groups of 16 columns are kGroupStep apart.
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

// Converts the scores of one m16n8 tile to probabilities exp2(score * multiplier - offset), rounded
// for the tensor cores: half `n` (0 or 1) of the A fragment `p`. Adds them to the lane's sums of
// its two rows.
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

}  // namespace ringattn::worker::cuda::sm80

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_SOFTMAX_CUH_
