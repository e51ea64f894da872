// Running statistics of the rows that a lane holds in the forward (row_softmax.cuh), and the
// rescaling of its partial results.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_ROWS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_ROWS_CUH_

#include "worker/kernels/cuda/primitives/numerics.cuh"
#include "worker/kernels/cuda/sm80/forward_softmax.cuh"

namespace ringattn::worker::cuda::sm80 {

// [row tile][upper or lower half].
template <typename Shape>
struct ForwardRows {
  static constexpr int kRowTiles = Shape::kRowTiles;

  float limit[kRowTiles][2];  // of scores; -inf until a key is seen
  float offset[kRowTiles][2];
  float sum[kRowTiles][2];  // this lane's columns only, until the end

  bool wide;  // a row of the warp is wide (score_rule.cuh)

  __device__ __forceinline__ void Clear() {
    wide = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        limit[m][half] = NegativeInfinity();
        offset[m][half] = 0.0f;
        sum[m][half] = 0.0f;
      }
    }
  }

  // Call it before the exponentials of a tile. Moves the offsets of rows whose maximum grew,
  // rescales their results, and subtracts the limits of wide rows from their scores. All rare work
  // is in one branch: a second branch for wide rows takes registers from every tile (d64 and d256
  // then spill, and lose 5% and 6%).
  __device__ __forceinline__ void Settle(typename Shape::Scores& scores, float multiplier,
                                         typename Shape::Output& output) {
    float max[kRowTiles][2];
    bool rare = wide;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x = fmaxf(scores[m][0][half * 2], scores[m][0][half * 2 + 1]);
#pragma unroll
        for (int n = 1; n < Shape::kKeyTiles; ++n) {
          x = fmaxf(x, fmaxf(scores[m][n][half * 2], scores[m][n][half * 2 + 1]));
        }
        x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
        x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
        max[m][half] = x;
        rare |= x > limit[m][half];
      }
    }
    if (__builtin_expect(!__any_sync(0xffffffff, rare), 1)) return;
    // Computed here, because there is no register to keep it.
    KeepHere(multiplier);
    const float headroom = __fdividef(kOffsetHeadroom, multiplier);
    bool grew_wide = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float factor = 1.0f;
        if (max[m][half] > limit[m][half]) {
          const RowBase moved(max[m][half], multiplier, headroom);
          factor = moved.Factor(limit[m][half], offset[m][half], multiplier);
          offset[m][half] = moved.offset;
          limit[m][half] = moved.limit;
          sum[m][half] *= factor;
          grew_wide |= moved.wide();
        }
#pragma unroll
        for (int n = 0; n < Shape::kDim / 8; ++n) {
          output[m][n][half * 2] *= factor;
          output[m][n][half * 2 + 1] *= factor;
        }
      }
    }
    wide |= __any_sync(0xffffffff, grew_wide);
    if (wide) SubtractLimits(scores, multiplier);
  }

 private:
  __device__ __forceinline__ void SubtractLimits(typename Shape::Scores& scores,
                                                 float multiplier) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // A select instead of a branch, which costs d64 32 bytes of spills.
        const float subtrahend =
            RowBase::Wide(limit[m][half], offset[m][half], multiplier) ? limit[m][half] : 0.0f;
#pragma unroll
        for (int n = 0; n < Shape::kKeyTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) scores[m][n][half * 2 + i] -= subtrahend;
        }
      }
    }
  }
};

}  // namespace ringattn::worker::cuda::sm80

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_ROWS_CUH_
