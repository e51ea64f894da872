// The computation of a consumer thread on its transposed scores between the products: S becomes P,
// and dP becomes dS. A thread has two keys (eight apart) by kRows q rows, in the accumulator layout
// of wgmma.cuh with keys as rows.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_BACKWARD_SCORES_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_BACKWARD_SCORES_CUH_

#include "worker/kernels/cuda/primitives/numerics.cuh"
#include "worker/kernels/cuda/primitives/score_rule.cuh"
#include "worker/kernels/cuda/sm90/backward/backward_shape.cuh"

namespace ringattn::worker::cuda::sm90 {

// The q rows that see each of the thread's two keys, relative to the thread's first row.
struct VisibleRows {
  int begin[2];
  int end[2];

  // `key` is the first key, `row` the first row, both relative to the tile.
  __device__ __forceinline__ VisibleRows(const QueryTile& tile, int key, int row, int keys) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int k = key + half * 8;
      begin[half] = k - tile.upper - row;
      end[half] = min(k - tile.lower + 1, tile.rows) - row;
      if (k >= keys) end[half] = 0;
    }
  }
  __device__ __forceinline__ bool Sees(int half, int row) const {
    return row >= begin[half] && row < end[half];
  }
};

template <typename Shape>
struct BackwardScores {
  using T = typename Shape::T;
  using Scores = float[Shape::kRows / 2];
  using Packed = uint32_t[Shape::kRows / 4];

  // Returns the statistics of the rows of the thread's columns 8 n and 8 n + 1; `first` points to
  // those of its first row.
  static __device__ __forceinline__ float2 Pair(const float* first, int n) {
    return *reinterpret_cast<const float2*>(first + n * 8);
  }
  // Return the rows' offsets and deltas, or 0 if the products include them.
  static __device__ __forceinline__ float2 Offsets(const float* statistics, int n) {
    if constexpr (Shape::kAddsOffsets) return {};
    return Pair(statistics + Shape::kOffsets, n);
  }
  static __device__ __forceinline__ float2 Deltas(const float* statistics, int n) {
    if constexpr (Shape::kAddsDeltas) return {};
    return Pair(statistics + Shape::kDeltas, n);
  }
  // Converts scores in place to the factors that multiply the gradients later: P or, with a
  // softcap, the tanh values. (P is also rounded later: packed P and dP together would need too
  // many registers.) `statistics` points to those of the thread's first row. `flags` are the
  // tile's; the tile is in shared memory.
  static __device__ __forceinline__ void Exponentials(Scores& scores, const float* statistics,
                                                      int32_t flags, const QueryTile& tile, int key,
                                                      int row, int keys,
                                                      const CommonParams& common) {
    if constexpr (Shape::kCapped) {
      const Softcap cap(common);
#pragma unroll
      for (int i = 0; i < Shape::kRows / 2; ++i) scores[i] = cap.Tangent(scores[i]);
    } else {
      if (flags & QueryTile::kWide) {
        Wide(scores, statistics + Shape::kLse, common.scale_log2);
      } else {
        Narrow(scores, statistics, common.scale_log2);
      }
      if (flags & QueryTile::kMasked) Mask(scores, VisibleRows(tile, key, row, keys));
    }
  }

  // Completes dP for a tile with these flags: if the tile is steep, subtracts delta, which the
  // product does not include.
  static __device__ __forceinline__ void SubtractSteep(Scores& gradients, const float* statistics,
                                                       int32_t flags) {
    if constexpr (Shape::kSteepTiles) {
      if ((flags & QueryTile::kSteep) == 0) return;
#pragma unroll
      for (int n = 0; n < Shape::kRows / 8; ++n) {
        const float2 delta = Pair(statistics + Shape::kDeltas, n);
#pragma unroll
        for (int i = 0; i < 4; ++i) gradients[n * 4 + i] -= i % 2 == 0 ? delta.x : delta.y;
      }
    }
  }

  // Computes P and dS, rounded, from the result of Exponentials and dP.
  static __device__ __forceinline__ void Differentiate(const Scores& scores,
                                                       const Scores& gradients, Packed& p,
                                                       Packed& ds, const float* statistics,
                                                       const QueryTile& tile, int key, int row,
                                                       int keys, const CommonParams& common) {
    if constexpr (Shape::kCapped) {
      Capped(scores, gradients, p, ds, statistics, VisibleRows(tile, key, row, keys), common);
    } else {
#pragma unroll
      for (int n = 0; n < Shape::kRows / 8; ++n) {
        const float2 delta = Deltas(statistics, n);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int i = n * 4 + half * 2;
          p[i / 2] = Pack<T>(scores[i], scores[i + 1]);
          ds[i / 2] = Pack<T>(scores[i] * Away(gradients[i], delta.x),
                              scores[i + 1] * Away(gradients[i + 1], delta.y));
        }
      }
    }
  }

  // The same in two steps, for threads that have only S or only dP. First step: converts scores to
  // P, rounded, and to the factor of dP - delta, which equals P unless there is a softcap.
  static __device__ __forceinline__ void Probabilities(Scores& scores, Packed& p, Packed& weights,
                                                       const float* statistics,
                                                       const QueryTile& tile, int key, int row,
                                                       int keys, const CommonParams& common) {
    if constexpr (Shape::kCapped) {
      CappedProbabilities(scores, p, weights, statistics, VisibleRows(tile, key, row, keys),
                          common);
    } else {
      Exponentials(scores, statistics, tile.flags, tile, key, row, keys, common);
#pragma unroll
      for (int i = 0; i < Shape::kRows / 4; ++i) {
        p[i] = weights[i] = Pack<T>(scores[i * 2], scores[i * 2 + 1]);
      }
    }
  }
  // Second step: computes dS, rounded, from dP and those factors.
  static __device__ __forceinline__ void Weigh(const Scores& gradients, const Packed& weights,
                                               Packed& ds, const float* statistics) {
#pragma unroll
    for (int n = 0; n < Shape::kRows / 8; ++n) {
      const float2 delta = Deltas(statistics, n);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = n * 4 + half * 2;
        const float2 weight = Unpack<T>(weights[i / 2]);
        ds[i / 2] = Pack<T>(weight.x * Away(gradients[i], delta.x),
                            weight.y * Away(gradients[i + 1], delta.y));
      }
    }
  }

  // Computes P for a tile with wide rows (score_rule.cuh); `multiplier` converts its scores to log2
  // units.
  static __device__ __forceinline__ void Wide(Scores& scores, const float* lse, float multiplier) {
#pragma unroll
    for (int n = 0; n < Shape::kRows / 8; ++n) {
      const float2 pair = Pair(lse, n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float row_lse = i % 2 == 0 ? pair.x : pair.y;
        float& x = scores[n * 4 + i];
        const float log_p = WideLogProbability(WideScore(x, multiplier), row_lse);
        x = row_lse == NegativeInfinity()
                ? 0.0f
                : Exp2(fmaf(log_p, kLog2E, static_cast<float>(Shape::kShift)));
      }
    }
  }

 private:
  // Returns dP - delta, times kUnshift.
  static __device__ __forceinline__ float Away(float gradient, float delta) {
    if constexpr (Shape::kAddsDeltas) return gradient * Shape::kUnshift;
    return fmaf(gradient, Shape::kUnshift, -delta);
  }

  static __device__ __forceinline__ void CappedProbabilities(Scores& scores, Packed& p,
                                                             Packed& weights,
                                                             const float* statistics,
                                                             const VisibleRows& visible,
                                                             const CommonParams& common) {
    const Softcap cap(common);
    constexpr float kLargest = Shape::kShift;
#pragma unroll
    for (int n = 0; n < Shape::kRows / 8; ++n) {
      const float2 offset = Offsets(statistics, n);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float probability[2], weight[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float tangent = cap.Tangent(scores[n * 4 + half * 2 + i]);
          const float exponent = fmaf(tangent, cap.cap_log2, i == 0 ? offset.x : offset.y);
          const float x = Exp2(exponent > kLargest ? kLargest : exponent);  // NaN stays NaN
          probability[i] = visible.Sees(half, n * 8 + i) ? x : 0.0f;
          weight[i] = probability[i] * Softcap::Derivative(tangent);
        }
        p[n * 2 + half] = Pack<T>(probability[0], probability[1]);
        weights[n * 2 + half] = Pack<T>(weight[0], weight[1]);
      }
    }
  }

  static __device__ __forceinline__ void Narrow(Scores& scores, const float* statistics,
                                                float scale_log2) {
#pragma unroll
    for (int n = 0; n < Shape::kRows / 8; ++n) {
      const float2 offset = Offsets(statistics, n);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& x = scores[n * 4 + half * 2];
        float& y = scores[n * 4 + half * 2 + 1];
        x = Exp2(fmaf(x, scale_log2, offset.x));
        y = Exp2(fmaf(y, scale_log2, offset.y));
      }
    }
  }

  static __device__ __forceinline__ void Mask(Scores& scores, const VisibleRows& visible) {
#pragma unroll
    for (int n = 0; n < Shape::kRows / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!visible.Sees(i / 2, n * 8 + i % 2)) scores[n * 4 + i] = 0.0f;
      }
    }
  }

  static __device__ __forceinline__ void Capped(const Scores& tangents, const Scores& gradients,
                                                Packed& p, Packed& ds, const float* statistics,
                                                const VisibleRows& visible,
                                                const CommonParams& common) {
    const float cap_log2 = Softcap(common).cap_log2;
    constexpr float kLargest = Shape::kShift;
#pragma unroll
    for (int n = 0; n < Shape::kRows / 8; ++n) {
      const float2 offset = Offsets(statistics, n);
      const float2 delta = Deltas(statistics, n);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float probability[2], gradient[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float tangent = tangents[n * 4 + half * 2 + i];
          const float exponent = fmaf(tangent, cap_log2, i == 0 ? offset.x : offset.y);
          const float x = Exp2(exponent > kLargest ? kLargest : exponent);  // NaN stays NaN
          probability[i] = visible.Sees(half, n * 8 + i) ? x : 0.0f;
          gradient[i] = probability[i] * Softcap::Derivative(tangent) *
                        Away(gradients[n * 4 + half * 2 + i], i == 0 ? delta.x : delta.y);
        }
        p[n * 2 + half] = Pack<T>(probability[0], probability[1]);
        ds[n * 2 + half] = Pack<T>(gradient[0], gradient[1]);
      }
    }
  }
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_BACKWARD_SCORES_CUH_
