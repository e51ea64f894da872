// dq_acc += scale dS k of one q tile; each group computes its passes over dq's columns.
//
// If shared memory is large enough (sm_90), dq tiles are staged there, and the copy engine adds
// them to global memory while the next tile's products run. Reductions directly from the
// accumulators, and whole rows by red.v4, block the load/store unit that ldmatrix needs (measured:
// 8 to 10% of the kernel).
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM80_BACKWARD_DQ_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM80_BACKWARD_DQ_CUH_

#include "worker/kernels/cuda/primitives/reduce.cuh"
#include "worker/kernels/cuda/primitives/shared_tile.cuh"
#include "worker/kernels/cuda/primitives/thread.cuh"
#include "worker/kernels/cuda/primitives/tma.cuh"
#include "worker/kernels/cuda/sm80/backward_products.cuh"
#include "worker/kernels/cuda/sm80/backward_walk.cuh"

namespace ringattn::worker::cuda::sm80 {

template <typename Shape>
struct BackwardDq {
  using Tile = typename Shape::Tile;

  // Returns the row of dS, among eight, that is row i of dq's accumulators. The rows of half a warp
  // are two apart, so that its stores to the staged tile have no bank conflicts.
  static __device__ __forceinline__ int QRowOf(int i) { return i % 4 * 2 + i / 4; }

  // Byte offset of an element of a staged dq part: its 16-byte chunk in the
  // box's row is permuted by row mod 8, as the copy engine expects.
  static __device__ __forceinline__ uint32_t StagedOffset(int row, int column) {
    const int chunk = column % 32 / 4 ^ (row & 7);
    return column / 32 * Shape::kBoxBytes + row * 128 + chunk * 16 + column % 4 * 4;
  }

  // Returns the thread's first row in dq's accumulators.
  static __device__ __forceinline__ int QRow(unsigned thread) {
    return (thread >> 5) % Shape::kQWarps * 16 + QRowOf(thread % 32 / 4);
  }

  // Computes the passes [kFirst, kEnd) with the threads of group `group` (1: gradients). The bases
  // are those of dS and k. The last pass, if staged, is left for AddStaged, after another barrier
  // of the group. REQUIRES: the kParts parts at `staged` are free; `staged_position` is the
  // thread's first element in the first part.
  template <int kFirst, int kEnd, int kParts>
  static __device__ __forceinline__ void Add(const BackwardParams& params, int group,
                                             unsigned thread, const BackwardQTile& tile,
                                             int64_t batch, uint32_t score_base, uint32_t k_base,
                                             uint32_t staged, uint32_t staged_position) {
#pragma unroll 1
    for (int pass = kFirst; pass < kEnd; ++pass) {
      typename Shape::QAccumulator acc;
      BackwardProducts<Shape>::QProduct(
          acc, score_base, Tile::Step(k_base, pass * Shape::kQN * Shape::kQColumnWarps));
      if constexpr (Shape::kStaged) {
        const uint32_t part = (pass - kFirst) % kParts * Shape::kPassBytes;
        if (kParts == 1 && pass > kFirst) {
          if (thread == 0) WaitBulkReads();
          SyncThreads<Shape::kGroupThreads>(Shape::kGroupBarrier + group);
        }
        Stage(acc, params.common.softmax_scale, staged_position + part);
        if (pass + 1 < kEnd) {
          if (kParts == 2 && thread == 0) WaitBulkReads();  // of the other part
          SyncThreads<Shape::kGroupThreads>(Shape::kGroupBarrier + group);
          AddStaged(params, thread, tile, batch, pass, staged + part);
        }
      } else {
        const CommonParams& common = params.common;
        const int row = QRow(thread);
        const int column = pass * Shape::kQColumns + LaneColumn<Shape::kQWarps>(thread);
        const int64_t row_stride = int64_t{common.num_heads} * common.head_dim;
        ReduceTile<Shape::kQM, 2 * Shape::kQN, Shape::kQWarps * 16, Shape::kQColumnWarps * 16>(
            acc, common.softmax_scale, tile.Target(params, batch) + row * row_stride + column,
            row_stride, row, tile.rows, column, common.head_dim,
            tile.rows >= Shape::kRows && common.head_dim == Shape::kDim);
      }
    }
  }

  // Starts adding the pass staged at `staged` to dq_acc. Before `staged` is overwritten, thread 0
  // of the group must call WaitBulkReads, followed by a barrier. Tiles that end early, whose
  // missing rows belong to other pieces, are added by the threads.
  static __device__ __forceinline__ void AddStaged(const BackwardParams& params, unsigned thread,
                                                   const BackwardQTile& tile, int64_t batch,
                                                   int pass, uint32_t staged) {
    const CommonParams& common = params.common;
    const int first = pass * Shape::kQColumns;
    if (params.has_dq_map && tile.rows >= Shape::kRows) {
      if (thread == 0) {
#pragma unroll
        for (int box = 0; box < Shape::kQColumns / 32; ++box) {
          if (first + box * 32 < common.head_dim) {
            StartTensorAdd(params.dq_map, staged + box * Shape::kBoxBytes, first + box * 32,
                           tile.span->head, static_cast<int>(tile.span->row_begin + tile.row),
                           static_cast<int>(batch));
          }
        }
        CommitBulk();
      }
      return;
    }
    float* target = tile.Target(params, batch) + first;
    const int64_t row_stride = int64_t{common.num_heads} * common.head_dim;
#pragma unroll 1
    for (int index = thread; index < Shape::kRows * Shape::kQColumns;
         index += Shape::kGroupThreads) {
      const int row = index / Shape::kQColumns;
      const int column = index % Shape::kQColumns;
      if (row < tile.rows && first + column < common.head_dim) {
        ReduceAdd(target + row * row_stride + column,
                  LoadShared(staged + StagedOffset(row, column)));
      }
    }
  }

 private:
  // `position` is the thread's first element in the staged part.
  static __device__ __forceinline__ void Stage(const typename Shape::QAccumulator& acc, float scale,
                                               uint32_t position) {
    KeepHere(position);
#pragma unroll
    for (int n = 0; n < 2 * Shape::kQN; ++n) {
      const int step = n / 2 * Shape::kQColumnWarps * 16 + n % 2 * 8;  // columns
      const uint32_t base = (position ^ (step % 32 * 4)) + step / 32 * Shape::kBoxBytes;
#pragma unroll
      for (int m = 0; m < Shape::kQM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(
                           base + (m * Shape::kQWarps * 16 + half * 8) * 128),
                       "f"(scale * acc[m][n][half * 2]), "f"(scale * acc[m][n][half * 2 + 1])
                       : "memory");
        }
      }
    }
    FenceBulkReads();
  }
};

}  // namespace ringattn::worker::cuda::sm80

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM80_BACKWARD_DQ_CUH_
