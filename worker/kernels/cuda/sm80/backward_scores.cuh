// The computation on a tile of scores between the products, in registers. In the values group S
// becomes P, in the gradients group dP becomes dS; both are masked, rounded and stored.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM80_BACKWARD_SCORES_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM80_BACKWARD_SCORES_CUH_

#include "worker/kernels/cuda/primitives/band.cuh"
#include "worker/kernels/cuda/primitives/mma.cuh"
#include "worker/kernels/cuda/primitives/numerics.cuh"
#include "worker/kernels/cuda/primitives/score_rule.cuh"
#include "worker/kernels/cuda/primitives/thread.cuh"

namespace ringattn::worker::cuda::sm80 {

template <typename Shape>
struct BackwardScores {
  using T = typename Shape::T;
  using ScoreTile = typename Shape::ScoreTile;
  using ScoreAccumulator = typename Shape::ScoreAccumulator;

  // Applies the score rule (score_rule.cuh) and converts scores to P. `lse` points to that of the
  // lane's first row; -inf, where p must be 0, yields an offset of -inf. With a softcap, stores P
  // times the cap's derivative in the score tile at `derivatives`, for the gradients group.
  static __device__ __forceinline__ void Exponentials(ScoreAccumulator& scores, const float* lse,
                                                      uint32_t derivatives,
                                                      const CommonParams& common) {
    KeepHere(derivatives);
    float offset[Shape::kScoreM][2];
    bool wide = false;
#pragma unroll
    for (int m = 0; m < Shape::kScoreM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float x = Statistic(lse, m, half);
        offset[m][half] = x == NegativeInfinity() ? x : fmaf(x, -kLog2E, Shape::kShift);
        wide |= IsWide(x) && x != NegativeInfinity();
      }
    }
    // One decision for the whole tile, so that the usual path is one sequence of instructions.
    if (common.softcap > 0.0f) {
      CappedExponentials(scores, offset, derivatives, common);
    } else if (__any_sync(0xffffffff, wide)) {
      WideExponentials(scores, lse, common.scale_log2);
    } else {
#pragma unroll
      for (int m = 0; m < Shape::kScoreM; ++m) {
#pragma unroll
        for (int n = 0; n < 2 * Shape::kScoreN; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            scores[m][n][i] = Exp2(fmaf(scores[m][n][i], common.scale_log2, offset[m][i / 2]));
          }
        }
      }
    }
  }

  // Converts gradients (dP) to dS, with P from the score tile at `probabilities`. `delta` points to
  // that of the lane's first row.
  static __device__ __forceinline__ void Differentiate(ScoreAccumulator& gradients,
                                                       const float* delta, uint32_t probabilities) {
    KeepHere(probabilities);
#pragma unroll
    for (int m = 0; m < Shape::kScoreM; ++m) {
      float offset[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        offset[half] = -Shape::kUnshift * Statistic(delta, m, half);
      }
#pragma unroll
      for (int n = 0; n < Shape::kScoreN; ++n) {
        uint32_t p[4];
        LoadMatrices(p, ScoreAddress(probabilities, m, n));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 pair = Unpack<T>(p[i]);
          float(&x)[4] = gradients[m][2 * n + i / 2];
          x[i % 2 * 2] = pair.x * fmaf(x[i % 2 * 2], Shape::kUnshift, offset[i % 2]);
          x[i % 2 * 2 + 1] = pair.y * fmaf(x[i % 2 * 2 + 1], Shape::kUnshift, offset[i % 2]);
        }
      }
    }
  }

  // `first_row` is relative to the range's first row; `first_column` is the lane's.
  static __device__ __forceinline__ void Mask(ScoreAccumulator& values, const QRange& range,
                                              int first_row, int first_column, int key_count) {
#pragma unroll
    for (int m = 0; m < Shape::kScoreM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int lower, upper;
        RowLimits(range.limits, first_row + m * Shape::kScoreWarps * 16 + half * 8, &lower, &upper);
        upper = min(upper, key_count - 1);
#pragma unroll
        for (int n = 0; n < 2 * Shape::kScoreN; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int column =
                first_column + (n / 2) * Shape::kScoreColumnWarps * 16 + (n % 2) * 8 + i;
            if (column < lower || column > upper) values[m][n][half * 2 + i] = 0.0f;
          }
        }
      }
    }
  }

  static __device__ __forceinline__ void StoreScores(const ScoreAccumulator& values,
                                                     uint32_t base) {
    KeepHere(base);
#pragma unroll
    for (int m = 0; m < Shape::kScoreM; ++m) {
#pragma unroll
      for (int n = 0; n < Shape::kScoreN; ++n) {
        uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float(&x)[4] = values[m][2 * n + i / 2];
          packed[i] = Pack<T>(x[i % 2 * 2], x[i % 2 * 2 + 1]);
        }
        StoreMatrices(ScoreAddress(base, m, n), packed);
      }
    }
  }

 private:
  static __device__ __forceinline__ void CappedExponentials(
      ScoreAccumulator& scores, const float (&offset)[Shape::kScoreM][2], uint32_t derivatives,
      const CommonParams& common) {
    const Softcap cap(common);
#pragma unroll
    for (int m = 0; m < Shape::kScoreM; ++m) {
#pragma unroll
      for (int n = 0; n < Shape::kScoreN; ++n) {
        uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float scaled[2];
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float& x = scores[m][2 * n + i / 2][i % 2 * 2 + j];
            const float tangent = cap.Tangent(x);
            const float exponent = fmaf(tangent, cap.cap_log2, offset[m][i % 2]);
            x = Exp2(exponent > Shape::kShift ? Shape::kShift : exponent);  // NaN stays NaN
            scaled[j] = x * Softcap::Derivative(tangent);
          }
          packed[i] = Pack<T>(scaled[0], scaled[1]);
        }
        StoreMatrices(ScoreAddress(derivatives, m, n), packed);
      }
    }
  }

  // Exponentials for a tile with wide rows (score_rule.cuh).
  static __device__ __forceinline__ void WideExponentials(ScoreAccumulator& scores,
                                                          const float* lse, float scale_log2) {
#pragma unroll
    for (int m = 0; m < Shape::kScoreM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float row_lse = Statistic(lse, m, half);
#pragma unroll
        for (int n = 0; n < 2 * Shape::kScoreN; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& x = scores[m][n][half * 2 + i];
            const float log_p = WideLogProbability(WideScore(x, scale_log2), row_lse);
            x = row_lse == NegativeInfinity() ? 0.0f : Exp2(fmaf(log_p, kLog2E, Shape::kShift));
          }
        }
      }
    }
  }

  // Returns a statistic of the lane's row in half `half` of the 16-row group `m`; `first` points to
  // that of its first row.
  static __device__ __forceinline__ float Statistic(const float* first, int m, int half) {
    return first[m * Shape::kScoreWarps * 16 + half * 8];
  }

  // Returns the address of the warp's 16 x 16 group (m, n) of a score tile, for the position whose
  // group (0, 0) is at `base`.
  static __device__ __forceinline__ uint32_t ScoreAddress(uint32_t base, int m, int n) {
    return ScoreTile::Step(base, n * Shape::kScoreColumnWarps) +
           m * Shape::kScoreWarps * 16 * ScoreTile::kRowBytes;
  }
};

}  // namespace ringattn::worker::cuda::sm80

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM80_BACKWARD_SCORES_CUH_
