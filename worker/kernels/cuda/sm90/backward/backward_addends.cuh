// Adds row statistics to the matrix products. S = K Q^T includes the offset of each row's scores,
// and dP = V dout^T includes -delta, by one additional k16 step. K's side of that step is the same
// for every key: three weights, and 0 in the other columns. q's side is a row's statistic in three
// parts, which together hold fp32's 24 bits. Consumers therefore do not read the statistics from
// shared memory. Each thread has 2 of 8 rows; a read of their statistics by its warp covers 32
// different bytes but occupies shared memory as long as a read of 256.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_BACKWARD_ADDENDS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_BACKWARD_ADDENDS_CUH_

#include "worker/kernels/cuda/primitives/numerics.cuh"
#include "worker/kernels/cuda/primitives/score_rule.cuh"
#include "worker/kernels/cuda/sm90/backward/backward_shape.cuh"
#include "worker/kernels/cuda/sm90/primitives/wgmma.cuh"

namespace ringattn::worker::cuda::sm90 {

enum class Addend { kOffset, kDelta };

// Rows with a larger lse (in natural units) are treated as wide: an offset of that size would round
// the sum of the scores' products in steps that are visible in P.
inline constexpr float kLargestAddedLse = 4096.0f;
// fp16 cannot represent deltas of this size or more: beyond 2^31 the first part would be infinite,
// and its product with a P of 0 NaN. Rows with such a delta are steep, and so is their tile. The
// consumers subtract the deltas of a steep tile from dP in registers. bf16 parts represent all of
// fp32.
inline constexpr float kLeastSteepDelta = 0x1p30f;
// Offsets are divided by the multiplier of the scores. fp16 parts can represent the result for
// multipliers in this range.
inline constexpr float kLeastMultiplier = 1e-5f, kLargestMultiplier = 1e4f;

template <typename Shape>
struct Addends {
  using T = typename Shape::T;
  using Scores = float[Shape::kRows / 2];

  // Address of a tile's addends: 16 bytes per row, of which the first six are used. They are the
  // first 8 columns of the step; the other 8 are zeros, shared by all tiles.
  static __device__ __forceinline__ int Place(int stage, Addend addend) {
    return Shape::kAddends + (stage * 2 + static_cast<int>(addend)) * Shape::kAddendBytes;
  }

  // Executed by one warp, before its first FenceBulkReads.
  static __device__ __forceinline__ void Clear(char* memory) {
#pragma unroll 1
    for (int row = threadIdx.x & 31; row < Shape::kRows; row += 32) {
      *reinterpret_cast<uint4*>(memory + Shape::kAddendZeros + row * 16) = {};
    }
  }
  // Writes a row's statistic as three parts whose sum with the weights below is the statistic. The
  // products read it after FenceBulkReads.
  static __device__ __forceinline__ void Write(char* row, float x) {
    uint32_t first, second, third;  // in the upper halves
    if constexpr (__is_same(T, __half)) {
      // Represents values up to 2^31; below 1 in steps of 2^-32.
      const __half high = __float2half_rn(x * 0x1p-15f);
      const float rest = Rest(x, 0x1p15f * __half2float(high));
      const __half middle = __float2half_rn(rest * 0x1p-4f);
      const __half low = __float2half_rn((rest - 0x1p4f * __half2float(middle)) * 0x1p8f);
      first = __half_as_ushort(high) << 16;
      second = __half_as_ushort(middle) << 16;
      third = __half_as_ushort(low) << 16;
    } else {
      first = __float_as_uint(x) & 0xffff0000;
      const float rest = Rest(x, __uint_as_float(first));
      second = __float_as_uint(rest) & 0xffff0000;
      third = __float_as_uint(rest - __uint_as_float(second));
    }
    *reinterpret_cast<uint4*>(row) = make_uint4(first >> 16 | second, third >> 16, 0, 0);
  }

  // Returns a consumer thread's part of K's side: columns 2 (lane % 4) and the next of its two
  // rows.
  static __device__ __forceinline__ uint32_t Weights() {
    constexpr bool kHalf = __is_same(T, __half);
    const int column = threadIdx.x % 4 * 2;
    if (column == 0) return kHalf ? 0x4c007800 : 0x3f803f80;  // 2^15 and 2^4, or ones
    if (column == 2) return kHalf ? 0x00001c00 : 0x00003f80;  // 2^-8, or one
    return 0;
  }
  // Issues scores += the rows' addends. The step's `weights` must be written before the batch's
  // fence.
  static __device__ __forceinline__ void Issue(Scores& scores, const uint32_t (&weights)[4],
                                               uint32_t shared, int stage, Addend addend) {
    const int place = Place(stage, addend);
    MultiplyRowsByRegisters<T>(scores, weights,
                               PlainDescriptor(shared + place, Shape::kAddendZeros - place), 1);
  }

 private:
  static __device__ __forceinline__ float Rest(float x, float part) {
    return fabsf(part) > kLargestFloat ? 0.0f : x - part;
  }
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_BACKWARD_ADDENDS_CUH_
