// Running statistics of the lane's rows in the wide forward [row tile][upper or lower half]; see
// forward_rows.cuh. Both warps of a pair have the same limits and offsets; each sums over its
// columns.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_WIDE_ROWS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_WIDE_ROWS_CUH_

#include "worker/kernels/cuda/primitives/numerics.cuh"
#include "worker/kernels/cuda/sm80/forward_softmax.cuh"

namespace ringattn::worker::cuda::sm80 {

template <typename Shape>
struct ForwardWideRows {
  static constexpr int kRowTiles = Shape::kRowTiles;

  float limit;  // of row lane / 4 of m8 group lane % 4
  float offset[kRowTiles][2];
  float sum[kRowTiles][2];
  bool wide;  // a row of the pair is wide (score_rule.cuh)

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        offset[m][half] = 0.0f;
        sum[m][half] = 0.0f;
      }
    }
    limit = NegativeInfinity();
    wide = false;
  }

  // Returns the limit of the lane's row in m16 tile m, upper or lower half.
  __device__ __forceinline__ float LimitOf(int m, int half, int lane) const {
    return __shfl_sync(0xffffffff, limit, (lane & 28) + m * 2 + half);
  }
  __device__ __forceinline__ float BaseOf(int m, int half, float multiplier, int lane) const {
    return RowBase::Of(LimitOf(m, half, lane), offset[m][half], multiplier);
  }

  // Call it before the exponentials of a tile with wide rows: subtracts their limits from their
  // scores.
  __device__ __forceinline__ void SubtractLimits(typename Shape::Scores& scores, float multiplier,
                                                 int lane) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float row_limit = LimitOf(m, half, lane);
        if (!RowBase::Wide(row_limit, offset[m][half], multiplier)) continue;
#pragma unroll
        for (int n = 0; n < Shape::kKeyTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) scores[m][n][half * 2 + i] -= row_limit;
        }
      }
    }
  }

  // Returns the lane's part of the row maxima: row lane / 4 of m8 group lane % 4.
  static __device__ __forceinline__ float Maximum(const typename Shape::Scores& scores, int lane) {
    float max[kRowTiles * 2];
#pragma unroll
    for (int group = 0; group < kRowTiles * 2; ++group) {
      const int half = group % 2;
      float x = fmaxf(scores[group / 2][0][half * 2], scores[group / 2][0][half * 2 + 1]);
#pragma unroll
      for (int n = 1; n < Shape::kKeyTiles; ++n) {
        x = fmaxf(x, fmaxf(scores[group / 2][n][half * 2], scores[group / 2][n][half * 2 + 1]));
      }
      max[group] = x;
    }
    // Four lanes have four partial maxima each; each lane ends with one complete maximum.
    const bool odd = lane & 1;
    const bool high = lane & 2;
    const float low_pair =
        fmaxf(odd ? max[1] : max[0], __shfl_xor_sync(0xffffffff, odd ? max[0] : max[1], 1));
    const float high_pair =
        fmaxf(odd ? max[3] : max[2], __shfl_xor_sync(0xffffffff, odd ? max[2] : max[3], 1));
    return fmaxf(high ? high_pair : low_pair,
                 __shfl_xor_sync(0xffffffff, high ? low_pair : high_pair, 2));
  }

  // Moves the offsets of rows whose maximum grew, and rescales their results.
  __device__ __forceinline__ void MoveOffsets(float max, float multiplier, int lane,
                                              typename Shape::Output& output) {
    const float old_offset = lane & 2 ? (lane & 1 ? offset[1][1] : offset[1][0])
                                      : (lane & 1 ? offset[0][1] : offset[0][0]);
    float own_offset = old_offset;
    float own_factor = 1.0f;
    bool grew_wide = false;
    if (max > limit) {
      const RowBase moved(max, multiplier, kOffsetHeadroom / multiplier);
      own_factor = moved.Factor(limit, old_offset, multiplier);
      own_offset = moved.offset;
      limit = moved.limit;
      grew_wide = moved.wide();
    }
    wide |= __any_sync(0xffffffff, grew_wide);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int source = (lane & 28) + m * 2 + half;
        offset[m][half] = __shfl_sync(0xffffffff, own_offset, source);
        const float factor = __shfl_sync(0xffffffff, own_factor, source);
        sum[m][half] *= factor;
#pragma unroll
        for (int n = 0; n < 2 * Shape::kColumnSteps; ++n) {
          output[m][n][half * 2] *= factor;
          output[m][n][half * 2 + 1] *= factor;
        }
      }
    }
  }
};

}  // namespace ringattn::worker::cuda::sm80

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_WIDE_ROWS_CUH_
