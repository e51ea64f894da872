// Computes ALiBi in a forward's consumer as one more k16 step of the product, so that it needs no
// instruction per score.
//
// If all keys of a tile are before its rows (or all after them), the distance is linear: that of
// the row from the tile's nearest column, plus that of this column from the key. The second is a
// whole number from -127 to 0, exact in bf16, and the same for all rows: it is B, a panel that is
// written once. A holds slope / scale as three bf16 numbers whose sum has all of its 24 bits.
// Scores are then products with a larger k, relative to
//  shift = slope / scale * distance of the row from the nearest column,
// which is included in the row's maximum and offset, once per tile and row. No part of such a sum
// is larger than the distance's share of the score. In other tiles, which contain both kinds of
// keys, B is zero, and each score has a separate multiply-add.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_FORWARD_ALIBI_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_FORWARD_ALIBI_CUH_

#include "worker/kernels/cuda/primitives/tma.cuh"
#include "worker/kernels/cuda/sm90/forward/forward_consumer.cuh"
#include "worker/kernels/cuda/sm90/forward/forward_softmax.cuh"
#include "worker/kernels/cuda/sm90/terms/terms_forward_shape.cuh"

namespace ringattn::worker::cuda::sm90 {

// B: row c of the panel is that of key c, and a step is 32 bytes of it.
template <typename Shape>
struct AlibiOffsets {
  static constexpr int kKeys = Shape::kKeys;
  static constexpr uint32_t kKeysBefore = 0, kKeysBehind = 32, kMixed = 64;

  // Executed by all threads of the block, before its barrier.
  static __device__ __forceinline__ void Write(char* memory) {
    for (int i = threadIdx.x; i < kKeys * 8; i += Shape::kThreads) {
      const int key = i / 8, part = i % 8 * 16;
      const float offset = part == kKeysBefore   ? static_cast<float>(key - (kKeys - 1))
                           : part == kKeysBehind ? static_cast<float>(-key)
                                                 : 0.0f;
      const uint32_t pair = Pack<__nv_bfloat16>(offset, offset);
      *reinterpret_cast<uint4*>(memory + Shape::kOffsets + key * kPanelRowBytes +
                                (part ^ (key & 7) * 16)) = make_uint4(pair, pair, 0, 0);
    }
    FenceBulkReads();
  }

  // Returns the producer's description of a tile: `distance` from row 0's aligned key to column 0.
  static __device__ __forceinline__ AlibiKeyTile Describe(int64_t distance, int64_t stride) {
    const float step = static_cast<float>(stride);
    const int64_t width = stride * (kKeys - 1);
    if (distance >= width) return {static_cast<float>(distance - width), step, kKeysBefore, 0};
    if (distance + stride * (Shape::kRows - 1) <= 0) {
      return {static_cast<float>(-distance), -step, kKeysBehind, 0};
    }
    return {0.0f, 0.0f, kMixed, 0};
  }
};

// The thread's two rows.
template <typename Shape>
struct AlibiRows {
  using Offsets = AlibiOffsets<Shape>;
  using Scores = float[Shape::kKeys / 2];

  const uint32_t panel;  // B's descriptor
  float slope[2];        // divided by the scale
  uint32_t pieces[2];    // A's parts, for the thread's columns
  uint32_t offsets;      // of the tile
  float shift[2];

  explicit __device__ __forceinline__ AlibiRows(uint32_t shared)
      : panel(RowDescriptor(shared + Shape::kOffsets)) {}

  // Call it for each new item.
  __device__ __forceinline__ void Begin(const TermForwardKernelParams& params,
                                        const float (&slopes)[2]) {
    const int column = threadIdx.x & 3;  // 0: the first two columns of A, 1: the next two, and so
                                         // on
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      slope[half] = slopes[half] / params.forward.common.softmax_scale;
      const float whole = slope[half] * static_cast<float>(params.stride);
      const float first = Rounded(whole), second = Rounded(whole - first);
      pieces[half] = column == 0   ? Pack<__nv_bfloat16>(first, second)
                     : column == 1 ? Pack<__nv_bfloat16>(whole - first - second, 0.0f)
                                   : 0;
    }
  }

  // Call it before the tile's product.
  __device__ __forceinline__ void Place(const AlibiKeyTile& tile, int packed_rows) {
    offsets = tile.offsets;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = half == 0 ? packed_rows & 0xffff : packed_rows >> 16;
      // Whole numbers, exact below 2^24.
      shift[half] = slope[half] * fmaf(tile.step, static_cast<float>(row), tile.first);
    }
  }

  // Issues the step after those of q k^T, in the same batch.
  __device__ __forceinline__ void Multiply(Scores& scores) const {
    const uint32_t a[4] = {pieces[0], pieces[1], 0, 0};
    MultiplyRowsByRegisters<__nv_bfloat16>(scores, a,
                                           WholeDescriptor(panel + DescriptorBytes(offsets)), 1);
  }

  // Applies ALiBi in a tile with both kinds of keys: `column` is the thread's first.
  __device__ __forceinline__ void Apply(Scores& scores, const TermKeyTile& tile, int packed_rows,
                                        int column, int stride) const {
    if (offsets != Offsets::kMixed) return;
    const float step = static_cast<float>(stride);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = half == 0 ? packed_rows & 0xffff : packed_rows >> 16;
      const float distance = tile.distance + step * static_cast<float>(row - column);
#pragma unroll
      for (int n = 0; n < Shape::kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = scores[n * 4 + half * 2 + i];
          const float away = fabsf(fmaf(-step, static_cast<float>(n * 8 + i), distance));
          score = fmaf(-slope[half], away, score);
        }
      }
    }
  }

 private:
  static __device__ __forceinline__ float Rounded(float x) {
    return __bfloat162float(__float2bfloat16_rn(x));
  }
};

// For kernels without ALiBi in the product: scores are not shifted.
struct NoAlibi {
  explicit __device__ __forceinline__ NoAlibi(uint32_t) {}
};

template <typename Shape>
struct AlibiOrNot {
  using Type = NoAlibi;
};
template <typename Shape>
requires(Shape::kAlibi) struct AlibiOrNot<Shape> {
  using Type = AlibiRows<Shape>;
};

// The effect of a tile on its warp's rows.
struct TileEffect {
  bool moved;    // an offset moved: the output must be multiplied by the factors
  bool nothing;  // all of its probabilities are 0
};

// Below this value Exp2 is 0, with more margin than the rounding of its arguments if no row is
// wide.
inline constexpr float kNoProbability = -128.0f;

// As SettleByBits (forward_softmax.cuh), for scores that are relative to -shift. Sets `shift` to 0
// if the scores are no longer relative to it, in tiles of wide rows.
//
// If slopes are steep, most keys are too far away for a probability that fp32 can represent.
template <int kCount>
__device__ __forceinline__ TileEffect SettleShifted(float (&scores)[kCount], float multiplier,
                                                    RowStates& rows, float (&shift)[2],
                                                    float (&factor)[2]) {
  int all[kCount], bits[2];
  BitsOf(scores, all);
  RowMaximaOfBits(all, bits);
  bool rare = rows.wide;
  bool nothing = true;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // No score is larger. NaN stays NaN: products and sums give it a positive sign.
    const float most = __int_as_float(::max(bits[half], 0));
    rare |= most > rows.limit[half] + shift[half];
    nothing &=
        fmaf(most, multiplier, -fmaf(shift[half], multiplier, rows.offset[half])) < kNoProbability;
    factor[half] = 1.0f;
  }
  rare = __any_sync(0xffffffff, rare);
  nothing = __all_sync(0xffffffff, nothing);
  if (!rare) return {false, nothing};
  float max[2];
  RowMaxima(scores, max);
#pragma unroll
  for (int half = 0; half < 2; ++half) max[half] -= shift[half];
  rare = rows.wide || max[0] > rows.limit[0] || max[1] > rows.limit[1];
  if (!__any_sync(0xffffffff, rare)) return {false, false};
  MoveBases(max, multiplier, __fdividef(kOffsetHeadroom, multiplier), rows, factor);
  if (rows.wide) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) scores[i] -= shift[i / 2 % 2];
    shift[0] = shift[1] = 0.0f;
    SubtractLimits(scores, multiplier, rows);
  }
  return {true, false};
}

// As Exponentials, for such scores, in two parts: before and after the wait for the last P V. ptxas
// divides them in this way without help, but not across a branch.
template <int kCount>
struct ShiftedExponentials {
  static constexpr int kEarly = 8;  // scores
  float sums[4];                    // of each row's even and odd columns

  __device__ __forceinline__ void Begin(float (&scores)[kCount], float multiplier,
                                        const float (&shift)[2], const RowStates& rows) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float offset = fmaf(shift[half], multiplier, rows.offset[half]);
#pragma unroll
      for (int n = 0; n < kCount / 4; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = scores[n * 4 + half * 2 + i];
          score = fmaf(score, multiplier, -offset);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = 0.0f;
    Add<0, kEarly>(scores);
  }
  __device__ __forceinline__ void Finish(float (&scores)[kCount], RowStates& rows) {
    Add<kEarly, kCount>(scores);
#pragma unroll
    for (int half = 0; half < 2; ++half) rows.sum[half] += sums[half * 2] + sums[half * 2 + 1];
  }

 private:
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void Add(float (&scores)[kCount]) {
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) {
      scores[i] = Exp2(scores[i]);
      sums[i % 4] += scores[i];
    }
  }
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_FORWARD_ALIBI_CUH_
