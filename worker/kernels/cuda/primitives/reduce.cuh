// Adds the results of many thread blocks to sums in global memory, by reductions from registers.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_REDUCE_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_REDUCE_CUH_

#include <cstdint>

namespace ringattn::worker::cuda {

__device__ __forceinline__ void ReduceAdd(float* target, float x) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(target), "f"(x) : "memory");
}

// target is aligned to 8 bytes.
__device__ __forceinline__ void ReduceAdd2(float* target, float x, float y) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v2.f32 [%0], {%1,%2};" ::"l"(target), "f"(x), "f"(y) : "memory");
#else
  ReduceAdd(target, x);
  ReduceAdd(target + 1, y);
#endif
}

// Adds scale times a warp tile of accumulators (mma layout) to fp32 rows in global memory. Groups
// of 16 rows are kRowStep apart, groups of 16 columns kColumnStep apart. `target` is the lane's
// first element (row lane / 4, column 2 (lane % 4) of the first group). `row` and `column` are its
// position, for the bounds; `whole` means that the whole tile is inside them.
template <int kRowTiles, int kColumnTiles, int kRowStep, int kColumnStep>
__device__ __forceinline__ void ReduceTile(const float (&acc)[kRowTiles][kColumnTiles][4],
                                           float scale, float* target, int64_t row_stride, int row,
                                           int rows, int column, int columns, bool whole) {
  if (whole) {
    // Computes all row addresses first: a reduction reads its address late, and a single register
    // pair for all addresses would make each row wait for the previous one.
    float* row_targets[kRowTiles][2];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_targets[m][half] = target + (m * kRowStep + half * 8) * row_stride;
        asm volatile("" : "+l"(row_targets[m][half]));
      }
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n) {
          ReduceAdd2(row_targets[m][half] + n / 2 * kColumnStep + n % 2 * 8,
                     scale * acc[m][n][half * 2], scale * acc[m][n][half * 2 + 1]);
        }
      }
    }
    return;
  }
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + m * kRowStep + half * 8 >= rows) continue;
      float* row_target = target + (m * kRowStep + half * 8) * row_stride;
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
        const int at = n / 2 * kColumnStep + n % 2 * 8;
        if (column + at < columns) ReduceAdd(row_target + at, scale * acc[m][n][half * 2]);
        if (column + at + 1 < columns) {
          ReduceAdd(row_target + at + 1, scale * acc[m][n][half * 2 + 1]);
        }
      }
    }
  }
}

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_REDUCE_CUH_
