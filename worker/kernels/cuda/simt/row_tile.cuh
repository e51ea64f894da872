// A tile of fp32 rows in shared memory, and the operations of 256 threads on it.
//
// Each of the kTile rows is shared by 256 / kTile neighbouring lanes, so that row reductions stay
// inside a warp. Rows are padded by 16 bytes: lanes that read different rows at the same column
// then use different banks, and every read is 16 bytes wide.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SIMT_ROW_TILE_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SIMT_ROW_TILE_CUH_

#include "worker/kernels/cuda/primitives/numerics.cuh"

namespace ringattn::worker::cuda::simt {

template <typename T, int kDim, int kTile>
struct RowTile {
  static constexpr int kThreads = 256;
  static constexpr int kLanes = kThreads / kTile;     // lanes that share a row
  static constexpr int kStride = kDim + 4;            // floats
  static constexpr int kScoreStride = kTile + 4;      // floats
  static constexpr int kColumns = kTile / kLanes;     // scores of one thread
  static constexpr int kVectors = kDim / 4 / kLanes;  // float4 of one thread in a row
  static constexpr int kTileBytes = kTile * kStride * 4;
  static constexpr int kScoreBytes = kTile * kScoreStride * 4;
  static_assert(kVectors >= 1 && kColumns >= 1);

  // Rows from valid_rows on and columns from `columns` on become zero.
  template <typename RowPointer>
  static __device__ __forceinline__ void Load(float* tile, int valid_rows, int columns,
                                              RowPointer row_pointer) {
    for (int index = threadIdx.x; index < kTile * kDim; index += kThreads) {
      const int row = index / kDim;
      const int column = index % kDim;
      float x = 0.0f;
      if (row < valid_rows && column < columns) x = ToFloat(row_pointer(row)[column]);
      tile[row * kStride + column] = x;
    }
  }

  // scores[i] = a[row] . b[lane + kLanes i]
  static __device__ __forceinline__ void Dots(const float* a, const float* b, int row, int lane,
                                              float (&scores)[kColumns]) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) scores[i] = 0.0f;
#pragma unroll 4
    for (int d = 0; d < kDim; d += 4) {
      const float4 x = *reinterpret_cast<const float4*>(a + row * kStride + d);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const float4 y = *reinterpret_cast<const float4*>(b + (lane + kLanes * i) * kStride + d);
        scores[i] = fmaf(x.x, y.x, scores[i]);
        scores[i] = fmaf(x.y, y.y, scores[i]);
        scores[i] = fmaf(x.z, y.z, scores[i]);
        scores[i] = fmaf(x.w, y.w, scores[i]);
      }
    }
  }

  // acc[j] += weight * row[4 (lane + kLanes j) ..]
  static __device__ __forceinline__ void Accumulate(float4 (&acc)[kVectors], float weight,
                                                    const float* row, int lane) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const float4 x = *reinterpret_cast<const float4*>(row + 4 * (lane + kLanes * j));
      acc[j].x = fmaf(weight, x.x, acc[j].x);
      acc[j].y = fmaf(weight, x.y, acc[j].y);
      acc[j].z = fmaf(weight, x.z, acc[j].z);
      acc[j].w = fmaf(weight, x.w, acc[j].w);
    }
  }

  static __device__ __forceinline__ void AddTo(float* target, const float4 (&acc)[kVectors],
                                               float scale, int lane, int columns) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int column = 4 * (lane + kLanes * j);
      const float values[4] = {acc[j].x, acc[j].y, acc[j].z, acc[j].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (column + i < columns) atomicAdd(target + column + i, scale * values[i]);
      }
    }
  }
};

}  // namespace ringattn::worker::cuda::simt

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SIMT_ROW_TILE_CUH_
