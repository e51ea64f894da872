// ALiBi in a forward's consumer thread, where nothing but the scale comes between a product and it:
// one multiply-add to a score, whose addend is a constant.
//
// Scores are kept in positions, score / slope: a key one position nearer is one more. Of a tile
// whose keys lie all before the row (or all behind it) they are relative to the nearest key's
// distance, `shift`, which the maximum and the offset of the row take up instead, once for a tile
// and row:
//   score / slope = product (scale / slope) - (away - shift) - shift
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_FORWARD_ALIBI_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_FORWARD_ALIBI_CUH_

#include "worker/kernels/cuda/sm90/forward_softmax.cuh"
#include "worker/kernels/cuda/sm90/terms_forward_shape.cuh"

namespace ringattn::worker::cuda::sm90 {

// Of kernels with a bias or dropout, whose registers are all taken, it serves nothing.
template <typename Shape>
struct AlibiPositions {
  static constexpr int kKeys = Shape::kKeys;
  static constexpr bool kServes = !Shape::kBiased && !Shape::kDrops;
  using Scores = float[kKeys / 2];

  bool serves = false;  // the item; else its scores are made elsewhere
  float factor = 0.0f;  // scale / slope

  // Of the thread's first column in a tile: its distance from the two rows; and what scores are
  // relative to.
  float distance[2];
  float shift[2] = {0.0f, 0.0f};

  // Slopes for which products in positions and their multiplier stay far from fp32's ends. Rows of
  // packed heads have slopes of their own.
  __device__ __forceinline__ void Begin(const TermForwardKernelParams& params, bool alone,
                                        float slope) {
    if constexpr (!kServes) return;
    const CommonParams& common = params.forward.common;
    constexpr float kLeast = 1.0f / (1 << 30), kMost = 1 << 30;
    factor = common.softmax_scale / slope;
    // A vote: or branches would be taken for those of single threads.
    serves = __all_sync(0xffffffff, alone && params.forward.head_pack == 1 && params.stride == 1 &&
                                        slope > kLeast && slope < kMost && factor > kLeast &&
                                        factor < kMost);
    shift[0] = shift[1] = 0.0f;
  }

  // `column` is the thread's first.
  __device__ __forceinline__ void Place(const TermKeyTile& tile, int flags, const int (&q_rows)[2],
                                        int column) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Whole numbers, exact below 2^24.
      distance[half] = tile.distance + static_cast<float>(q_rows[half] - column);
      shift[half] = flags & TermKeyTile::kKeysBefore   ? distance[half] - kNearest
                    : flags & TermKeyTile::kKeysBehind ? -distance[half]
                                                       : 0.0f;
    }
  }

  __device__ __forceinline__ void Apply(Scores& scores, int flags) const {
    if (flags & TermKeyTile::kKeysBefore) {
      OneSided<1>(scores);
    } else if (flags & TermKeyTile::kKeysBehind) {
      OneSided<-1>(scores);
    } else {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        const float away = distance[i / 2 % 2] - static_cast<float>(i / 4 * 8 + i % 2);
        scores[i] = fmaf(scores[i], factor, -fabsf(away));
      }
    }
  }

 private:
  static constexpr int kNearest = kKeys - 7;  // the thread's last column

  template <int kSign>
  __device__ __forceinline__ void OneSided(Scores& scores) const {
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      const int column = i / 4 * 8 + i % 2;
      scores[i] =
          fmaf(scores[i], factor, static_cast<float>(kSign > 0 ? column - kNearest : -column));
    }
  }
};

// As Settle (forward_softmax.cuh), of scores that are relative to -shift. `shift` becomes 0 where
// scores cease to be: in wide rows' tiles.
template <int kCount>
__device__ __forceinline__ bool SettleShifted(float (&scores)[kCount], float multiplier,
                                              float headroom, RowStates& rows, float (&shift)[2],
                                              float (&factor)[2]) {
  float max[2];
  bool rare = rows.wide;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float x = fmaxf(scores[half * 2], scores[half * 2 + 1]);
    float y = fmaxf(scores[4 + half * 2], scores[4 + half * 2 + 1]);
#pragma unroll
    for (int n = 2; n < kCount / 4; n += 2) {
      x = fmaxf(x, fmaxf(scores[n * 4 + half * 2], scores[n * 4 + half * 2 + 1]));
      y = fmaxf(y, fmaxf(scores[n * 4 + 4 + half * 2], scores[n * 4 + 4 + half * 2 + 1]));
    }
    // Lanes of a row have shifts of their own.
    x = fmaxf(x, y) - shift[half];
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
    max[half] = x;
    rare |= x > rows.limit[half];
    factor[half] = 1.0f;
  }
  if (!__any_sync(0xffffffff, rare)) return false;
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
  if (rows.wide) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) scores[i] -= shift[i / 2 % 2];
    shift[0] = shift[1] = 0.0f;
    SubtractLimits(scores, multiplier, rows);
  }
  return true;
}

// As Exponentials, of such scores.
template <int kCount>
__device__ __forceinline__ void ExponentialsShifted(float (&scores)[kCount], float multiplier,
                                                    const float (&shift)[2], RowStates& rows) {
  RowStates shifted = rows;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    shifted.offset[half] = fmaf(shift[half], multiplier, rows.offset[half]);
  }
  Exponentials(scores, multiplier, shifted);
#pragma unroll
  for (int half = 0; half < 2; ++half) rows.sum[half] = shifted.sum[half];
}

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_FORWARD_ALIBI_CUH_
