// Running statistics of the rows that a lane holds in the forward, and the rescaling of what it
// has of them. Probabilities are exp2(score * multiplier - offset); a row's offset moves only
// when a score exceeds its limit, 2^8 above it (exact after normalisation), which makes
// rescaling rare.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_ROWS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_ROWS_CUH_

#include "worker/kernels/cuda/primitives/numerics.cuh"
#include "worker/kernels/cuda/sm80/forward_softmax.cuh"

namespace ringattn::worker::cuda::sm80 {

// [row tile][upper or lower half].
template <typename Shape>
struct ForwardRows {
  static constexpr int kRowTiles = Shape::kRowTiles;

  float limit[kRowTiles][2];  // of scores; -inf until a key was seen
  float offset[kRowTiles][2];
  float sum[kRowTiles][2];  // this lane's columns only, until the end

  bool wide;  // one of the warp's rows is; see IsWide below

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

  // Moves the offsets of rows whose maximum grew, and rescales what they have.
  __device__ __forceinline__ void MoveOffsets(const typename Shape::Scores& scores,
                                              float multiplier, float headroom,
                                              typename Shape::Output& output) {
    float max[kRowTiles][2];
    bool grew = false;
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
        grew |= x > limit[m][half];
      }
    }
    if (!__any_sync(0xffffffff, grew)) return;
    bool grew_wide = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float factor = 1.0f;
        if (max[m][half] > limit[m][half]) {
          const RowBase moved(max[m][half], multiplier, headroom);
          factor =
              limit[m][half] == NegativeInfinity()
                  ? 0.0f
                  : Exp2(RowBase::Of(limit[m][half], offset[m][half], multiplier) - moved.base);
          offset[m][half] = moved.offset;
          limit[m][half] = moved.limit;
          sum[m][half] *= factor;
          grew_wide |= moved.offset != moved.base;
        }
#pragma unroll
        for (int n = 0; n < Shape::kDim / 8; ++n) {
          output[m][n][half * 2] *= factor;
          output[m][n][half * 2 + 1] *= factor;
        }
      }
    }
    wide |= __any_sync(0xffffffff, grew_wide);
  }

  // Before the exponentials of a tile, where rows are wide: their scores become relative.
  __device__ __forceinline__ void SubtractBases(typename Shape::Scores& scores,
                                                float multiplier) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float base = RowBase::Of(limit[m][half], offset[m][half], multiplier);
        if (base == offset[m][half]) continue;
#pragma unroll
        for (int n = 0; n < Shape::kKeyTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& x = scores[m][n][half * 2 + i];
            x = (WideScore(x, multiplier) - base) / multiplier;
          }
        }
      }
    }
  }
};

}  // namespace ringattn::worker::cuda::sm80

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_ROWS_CUH_
