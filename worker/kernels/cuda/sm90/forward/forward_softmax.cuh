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
  float limit[2];  // a larger score moves the offset; -inf until a key is seen
  float offset[2];
  float sum[2];  // of this thread's columns
  bool wide;     // a row of the warp is wide (score_rule.cuh)

  // Call it after the last tile: converts offsets to the bases of the sums, including those of wide
  // rows.
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

// Converts raw scores to log2 units, with a softcap or with a scale that is not positive (the
// maximum must then be taken after scaling).
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

// `tile` as read by lane 0. `q_rows` are the q rows of the thread's two rows (packed heads share
// one), `column` is its first column in the key tile.
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

// Subtracts the limits of wide rows from their scores.
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

// Computes the largest score of the quad in each of its two rows.
template <int kCount>
__device__ __forceinline__ void RowMaxima(const float (&scores)[kCount], float (&max)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Two chains, so that the comparisons do not wait for each other.
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

// As __float_as_int, which nvcc would split: where branches merge, scores and their bits would be
// in separate registers, and each score would be copied.
template <int kCount>
__device__ __forceinline__ void BitsOf(const float (&scores)[kCount], int (&bits)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm("mov.b32 %0, %1;" : "=r"(bits[i]) : "f"(scores[i]));
}

// RowMaxima of the bits as integers, three at a time. Exact if the maximum is not negative;
// otherwise a lower bound.
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

// Moves the offsets of rows whose maximum exceeds their limit. factor[half] is then the factor for
// the row's output. `headroom`: as in RowBase.
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

// The same, and subtracts the limits of wide rows from their scores.
template <int kCount>
__device__ __forceinline__ void MoveOffsets(float (&scores)[kCount], const float (&max)[2],
                                            float multiplier, float headroom, RowStates& rows,
                                            float (&factor)[2]) {
  MoveBases(max, multiplier, headroom, rows, factor);
  if (rows.wide) SubtractLimits(scores, multiplier, rows);
}

// Call it before the exponentials of a tile: runs MoveOffsets if a row needs it; factor[half] is 1
// for other rows. Returns false, the usual case, if no row needs it. `headroom`: as in RowBase.
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

// The same with integer maxima of bits, which need more registers than most kernels with score
// terms have. kMerged: scores come from branches that merge. `headroom_log2`: how far scores may
// exceed an offset, which is the headroom of RowBase times the multiplier.
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
    // Negative maxima are lower bounds. They cannot exceed a limit of 0 or more.
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

// Converts scores to probabilities times 2^lift, in place, and adds them to the sums.
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

// Packs the A fragments of the second product.
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
