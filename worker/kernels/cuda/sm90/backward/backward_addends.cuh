// Row statistics as addends of the products that they belong to: S = K Q^T comes with what a row
// adds to its scores, dP = V dout^T with -delta, by one more k16 step. Of it K's side is the same
// for every key: three weights, and 0 in the other columns; q's side is a row's statistic in three
// parts, which together hold fp32's 24 bits. So no consumer reads them: each thread has 2 of 8
// rows, of whose statistics a read by its warp, 32 different bytes, takes shared memory as long as
// 256 do.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_BACKWARD_ADDENDS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_BACKWARD_ADDENDS_CUH_

#include "worker/kernels/cuda/primitives/numerics.cuh"
#include "worker/kernels/cuda/primitives/score_rule.cuh"
#include "worker/kernels/cuda/sm90/backward/backward_shape.cuh"
#include "worker/kernels/cuda/sm90/primitives/wgmma.cuh"

namespace ringattn::worker::cuda::sm90 {

enum class Addend { kOffset, kDelta };

// Rows with a larger lse (in natural units) are treated as wide: an offset would come into the sum
// of their scores' products in steps that show in P.
inline constexpr float kLargestAddedLse = 4096.0f;
// From here on a delta is none of fp16's: beyond 2^31 its first part would be infinite, and NaN
// what a P of 0 makes of it. Rows with one are steep, and so is their tile: consumers subtract its
// deltas from dP themselves. bf16 has parts for all of fp32.
inline constexpr float kLeastSteepDelta = 0x1p30f;
// Offsets are divided by what scores are multiplied by; fp16 has parts for what comes of these.
inline constexpr float kLeastMultiplier = 1e-5f, kLargestMultiplier = 1e4f;

template <typename Shape>
struct Addends {
  using T = typename Shape::T;
  using Scores = float[Shape::kRows / 2];

  // Where those of a tile lie: 16 bytes a row, of which the first six are used. They are the step's
  // first 8 columns; the other 8 are zeros, the same for all.
  static __device__ __forceinline__ int Place(int stage, Addend addend) {
    return Shape::kAddends + (stage * 2 + static_cast<int>(addend)) * Shape::kAddendBytes;
  }

  // Written by one warp, before its first FenceBulkReads.
  static __device__ __forceinline__ void Clear(char* memory) {
#pragma unroll 1
    for (int row = threadIdx.x & 31; row < Shape::kRows; row += 32) {
      *reinterpret_cast<uint4*>(memory + Shape::kAddendZeros + row * 16) = {};
    }
  }
  // A row's statistic, in parts that the weights below put together. The products read it after
  // FenceBulkReads.
  static __device__ __forceinline__ void Write(char* row, float x) {
    uint32_t first, second, third;  // in the upper halves
    if constexpr (__is_same(T, __half)) {
      // Up to 2^31; below 1 in steps of 2^-32.
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

  // A consumer thread's part of K's side: its two rows' columns 2 (lane % 4) and the next.
  static __device__ __forceinline__ uint32_t Weights() {
    constexpr bool kHalf = __is_same(T, __half);
    const int column = threadIdx.x % 4 * 2;
    if (column == 0) return kHalf ? 0x4c007800 : 0x3f803f80;  // 2^15 and 2^4, or ones
    if (column == 2) return kHalf ? 0x00001c00 : 0x00003f80;  // 2^-8, or one
    return 0;
  }
  // Issues scores += the rows' addends. `weights` of the step were there before the batch's fence.
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
