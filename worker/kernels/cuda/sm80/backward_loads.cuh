// Copies the backward's operands into shared memory. Each group copies its operands, unless the
// shape has kValuesLoad. Missing rows, and their statistics, become zeros, so that they add
// nothing. Complete after WaitCopies and a barrier.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM80_BACKWARD_LOADS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM80_BACKWARD_LOADS_CUH_

#include "worker/kernels/cuda/primitives/copy_async.cuh"
#include "worker/kernels/cuda/primitives/tile_copy.cuh"
#include "worker/kernels/cuda/sm80/backward_walk.cuh"

namespace ringattn::worker::cuda::sm80 {

template <typename Shape>
struct BackwardLoads {
  using T = typename Shape::T;

  const BackwardParams& params;
  const bool gradients;      // the thread's group
  const unsigned thread;     // of the group
  const uint32_t row_tiles;  // in shared memory, [q, dout][buffer]
  char* const statistics;    // in shared memory, [buffer][lse, delta]
  const int64_t batch;

  // Copies the group's k or v to `target`; kv_row is the tile's first row in it.
  __device__ __forceinline__ void StartKv(const BackwardTile& tile, uint32_t target, int64_t kv_row,
                                          int kv_head) const {
    const CommonParams& common = params.common;
    const int columns = gradients ? common.head_dim_v : common.head_dim;
    const int64_t stride = int64_t{common.num_kv_heads} * columns;
    TileCopy<T, Shape::kDim, Shape::kKeys, Shape::kGroupThreads>::Load(
        target, thread,
        static_cast<const T*>(gradients ? tile.v : tile.k) + kv_row * stride + kv_head * columns,
        stride, tile.rows, columns, gradients ? common.vector_v : common.vector_qk);
  }

  // Copies a tile of q and dout, with their statistics, from row `row` of the span on.
  __device__ __forceinline__ void StartTile(const BackwardSpan& span, int row, int buffer) const {
    if constexpr (Shape::kValuesLoad) {
      if (!gradients) {
        LoadOperand(false, span, row, buffer);
        LoadOperand(true, span, row, buffer);
      }
    } else {
      LoadOperand(gradients, span, row, buffer);
    }
    CommitCopies();
  }

 private:
  __device__ __forceinline__ void LoadOperand(bool dout, const BackwardSpan& span, int row,
                                              int buffer) const {
    const CommonParams& common = params.common;
    const int columns = dout ? common.head_dim_v : common.head_dim;
    const int valid_rows = span.row_count - row;
    const int64_t token = batch * common.q_rows + span.row_begin + row;
    TileCopy<T, Shape::kDim, Shape::kRows, Shape::kGroupThreads>::Load(
        row_tiles + (dout * 2 + buffer) * Shape::kQBytes, thread,
        static_cast<const T*>(dout ? params.dout : params.q) +
            (token * common.num_heads + span.head) * columns,
        int64_t{common.num_heads} * columns, valid_rows, columns,
        dout ? common.vector_v : common.vector_qk);
    if (Shape::kRows == Shape::kGroupThreads || thread < Shape::kRows) {
      const float* source = (dout ? params.delta : params.lse) +
                            (batch * common.num_heads + span.head) * common.q_rows +
                            span.row_begin + row + thread;
      CopyAsync4(
          SharedAddress(statistics) + (buffer * 2 + dout) * Shape::kStatisticsBytes + thread * 4,
          source, static_cast<int>(thread) < valid_rows);
    }
  }
};

}  // namespace ringattn::worker::cuda::sm80

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM80_BACKWARD_LOADS_CUH_
