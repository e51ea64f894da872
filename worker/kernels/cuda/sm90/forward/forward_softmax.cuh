// The online softmax of a consumer thread: two rows (upper and lower, eight apart) of
// its warpgroup's scores, in the accumulator layout of wgmma.cuh.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_FORWARD_SOFTMAX_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_FORWARD_SOFTMAX_CUH_

#include "worker/kernels/cuda/primitives/numerics.cuh"
#include "worker/kernels/cuda/primitives/row_softmax.cuh"
#include "worker/kernels/cuda/primitives/score_rule.cuh"
#include "worker/kernels/cuda/sm90/forward/forward_shape.cuh"

namespace ringattn::worker::cuda::sm90 {

// As in row_softmax.cuh.
struct RowStates {
  float limit[2];  // a larger score moves the offset; -inf until a key was seen
  float offset[2];
  float sum[2];  // of this thread's columns
  bool wide;     // one of the warp's rows is (score_rule.cuh)

  // After the last tile: offsets become what sums are relative to, of wide rows as well.
  __device__ __forceinline__ void OffsetsToBases(float multiplier) {
    if (!wide) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      offset[half] = RowBase::Of(limit[half], offset[half], multiplier);
    }
  }

  __device__ __forceinline__ void Reset() {
    wide = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      limit[half] = NegativeInfinity();
      offset[half] = 0.0f;
      sum[half] = 0.0f;
    }
  }
};

// Scores that are no longer raw: with a softcap, or with a scale that is not positive
// (the maximum must be taken after it). In log2 units afterwards.
template <int kCount>
__device__ __forceinline__ void TransformScores(float (&scores)[kCount],
                                                const CommonParams& common) {
  if (common.softcap > 0.0f) {
    const Softcap cap(common);
#pragma unroll
    for (int i = 0; i < kCount; ++i) scores[i] = cap.Score(cap.Tangent(scores[i]));
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) scores[i] *= common.scale_log2;
  }
}

// `tile` as lane 0 has read it. `q_rows` are the thread's two rows in the tile (of q: packed
// heads share one), `column` its first column in the key tile.
template <int kCount>
__device__ __forceinline__ void MaskScores(float (&scores)[kCount], const KeyTile& tile,
                                           const int (&q_rows)[2], int column) {
  const int tile_lower = __shfl_sync(0xffffffff, tile.lower, 0) - column;
  const int tile_upper = __shfl_sync(0xffffffff, tile.upper, 0) - column;
  const int last = __shfl_sync(0xffffffff, tile.columns, 0) - 1 - column;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int lower = tile_lower + q_rows[half];
    const int upper = min(tile_upper + q_rows[half], last);
#pragma unroll
    for (int n = 0; n < kCount / 4; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = n * 8 + i;
        if (at < lower || at > upper) scores[n * 4 + half * 2 + i] = NegativeInfinity();
      }
    }
  }
}

// The scores of wide rows become relative to their limit.
template <int kCount>
__device__ __forceinline__ void SubtractLimits(float (&scores)[kCount], float multiplier,
                                               const RowStates& rows) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!RowBase::Wide(rows.limit[half], rows.offset[half], multiplier)) continue;
#pragma unroll
    for (int n = 0; n < kCount / 4; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) scores[n * 4 + half * 2 + i] -= rows.limit[half];
    }
  }
}

// The largest score of the quad in each of its two rows.
template <int kCount>
__device__ __forceinline__ void RowMaxima(const float (&scores)[kCount], float (&max)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Two chains, so that the comparisons do not wait for one another.
    float x = fmaxf(scores[half * 2], scores[half * 2 + 1]);
    float y = fmaxf(scores[4 + half * 2], scores[4 + half * 2 + 1]);
#pragma unroll
    for (int n = 2; n < kCount / 4; n += 2) {
      x = fmaxf(x, fmaxf(scores[n * 4 + half * 2], scores[n * 4 + half * 2 + 1]));
      y = fmaxf(y, fmaxf(scores[n * 4 + 4 + half * 2], scores[n * 4 + 4 + half * 2 + 1]));
    }
    x = fmaxf(x, y);
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    max[half] = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
  }
}

// As __float_as_int, which nvcc would take apart: where branches merge, scores and their bits would
// be registers of their own, and each score would be copied.
template <int kCount>
__device__ __forceinline__ void BitsOf(const float (&scores)[kCount], int (&bits)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm("mov.b32 %0, %1;" : "=r"(bits[i]) : "f"(scores[i]));
}

// RowMaxima of bits as integers, three at a time: right where it is not negative, else less.
template <int kCount>
__device__ __forceinline__ void RowMaximaOfBits(const int (&bits)[kCount], int (&max)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int x = ::max(bits[half * 2], bits[half * 2 + 1]);
    int y = ::max(bits[4 + half * 2], bits[4 + half * 2 + 1]);
#pragma unroll
    for (int n = 2; n < kCount / 4; n += 2) {
      x = ::max(::max(x, bits[n * 4 + half * 2]), bits[n * 4 + half * 2 + 1]);
      y = ::max(::max(y, bits[n * 4 + 4 + half * 2]), bits[n * 4 + 4 + half * 2 + 1]);
    }
    x = ::max(x, y);
    x = ::max(x, __shfl_xor_sync(0xffffffff, x, 1));
    max[half] = ::max(x, __shfl_xor_sync(0xffffffff, x, 2));
  }
}

// Moves the offsets of rows whose maximum grew beyond their limit; factor[half] is then what the
// row's output is to be multiplied with. `headroom`: of RowBase.
__device__ __forceinline__ void MoveBases(const float (&max)[2], float multiplier, float headroom,
                                          RowStates& rows, float (&factor)[2]) {
  bool grew_wide = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (max[half] > rows.limit[half]) {
      const RowBase moved(max[half], multiplier, headroom);
      factor[half] = moved.Factor(rows.limit[half], rows.offset[half], multiplier);
      rows.offset[half] = moved.offset;
      rows.limit[half] = moved.limit;
      rows.sum[half] *= factor[half];
      grew_wide |= moved.wide();
    }
  }
  rows.wide |= __any_sync(0xffffffff, grew_wide);
}

// The same, and the scores of wide rows become relative to their limit.
template <int kCount>
__device__ __forceinline__ void MoveOffsets(float (&scores)[kCount], const float (&max)[2],
                                            float multiplier, float headroom, RowStates& rows,
                                            float (&factor)[2]) {
  MoveBases(max, multiplier, headroom, rows, factor);
  if (rows.wide) SubtractLimits(scores, multiplier, rows);
}

// Before the exponentials of a tile: MoveOffsets where a row needs it; factor[half] is 1 where it
// does not. False, the usual case, if nothing was to be done. `headroom`: of RowBase.
template <int kCount>
__device__ __forceinline__ bool Settle(float (&scores)[kCount], float multiplier, float headroom,
                                       RowStates& rows, float (&factor)[2]) {
  float max[2];
  RowMaxima(scores, max);
  bool rare = rows.wide;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    rare |= max[half] > rows.limit[half];
    factor[half] = 1.0f;
  }
  if (!__any_sync(0xffffffff, rare)) return false;
  MoveOffsets(scores, max, multiplier, headroom, rows, factor);
  return true;
}

// The same with maxima of bits, which need more registers: most kernels with score terms have none
// left. kMerged: scores come from branches that merge.
// `headroom_log2`: by how much scores may exceed an offset, which is RowBase's times the
// multiplier.
template <bool kMerged = false, int kCount>
__device__ __forceinline__ bool SettleByBits(float (&scores)[kCount], float multiplier,
                                             float headroom_log2, RowStates& rows,
                                             float (&factor)[2]) {
  int all[kCount], bits[2];
  if constexpr (kMerged) {
    BitsOf(scores, all);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) all[i] = __float_as_int(scores[i]);
  }
  RowMaximaOfBits(all, bits);
  bool rare = rows.wide;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Below 0 they are those of the least score: no limit of 0 or more is exceeded then.
    rare |= __int_as_float(bits[half]) > rows.limit[half] ||
            (bits[half] & __float_as_int(rows.limit[half])) < 0;
    factor[half] = 1.0f;
  }
  if (!__any_sync(0xffffffff, rare)) return false;
  float max[2];
  RowMaxima(scores, max);
  rare = rows.wide || max[0] > rows.limit[0] || max[1] > rows.limit[1];
  if (!__any_sync(0xffffffff, rare)) return false;
  MoveOffsets(scores, max, multiplier, __fdividef(headroom_log2, multiplier), rows, factor);
  return true;
}

// Scores become probabilities times 2^lift, in place, and enter the sums.
template <int kCount>
__device__ __forceinline__ void Exponentials(float (&scores)[kCount], float multiplier,
                                             RowStates& rows, float lift = 0.0f) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float offset = rows.offset[half] - lift;
    float x = 0.0f, y = 0.0f;
#pragma unroll
    for (int n = 0; n < kCount / 4; ++n) {
      float& a = scores[n * 4 + half * 2];
      float& b = scores[n * 4 + half * 2 + 1];
      a = Exp2(fmaf(a, multiplier, -offset));
      b = Exp2(fmaf(b, multiplier, -offset));
      x += a;
      y += b;
    }
    rows.sum[half] += x + y;
  }
}

// The A fragments of the second product.
template <typename T, int kCount>
__device__ __forceinline__ void PackProbabilities(const float (&scores)[kCount],
                                                  uint32_t (&p)[kCount / 2]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) p[i] = Pack<T>(scores[2 * i], scores[2 * i + 1]);
}

template <int kCount>
__device__ __forceinline__ void Rescale(float (&output)[kCount], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) output[i] *= factor[i / 2 % 2];
}

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_FORWARD_SOFTMAX_CUH_
