// Backward attention on tensor cores by mma.sync (sm_80 and later).
//
// Shapes as in attention_kernel.h (BackwardCall), all in global memory of the launching device. One
// thread block owns kKeys keys of one kv head and walks every q tile of kRows rows that sees them,
// over the query heads of the group. Two groups of four warps share the work of a tile:
//  values group:    S = q k^T, P = exp(S - lse), dV += P^T dout,
//                   dq_acc += scale dS k for the first columns
//  gradients group: dP = dout v^T, dS = P (dP - delta), dK += dS^T q,
//                   dq_acc += scale dS k for the other columns, one tile late
// P (rounded) is passed between the groups through shared memory, from which both groups read it;
// dS is also in shared memory. dV and dK stay in registers (fp32) and are added to the caller's
// buffers by reductions at the end. Several thread blocks may therefore share a key tile, with
// different heads.
//
// Reason for two groups: shared-memory reads bound an mma.sync kernel. For a given number of
// accumulators, a warp's output tile costs reads in proportion to its height plus its width. A warp
// that holds only one of dK and dV, and computes only one of S and dP, has twice the accumulators
// for it. At head_dim 128 it has 32 x 64 instead of 32 x 32 (S) and 64 x 64 instead of 32 x 64 (dK,
// dV), a quarter fewer reads in total. The groups run the same code on different operands (q, k, dV
// and dout, v, dK). Each scheduler of the SM holds one warp of each group, so that one group's
// exponentials run during the other's products.
//
// Order: __syncthreads begins a tile and protects the last tile's q and dout and the operands of dV
// and dK. Inside a tile the gradients group waits for P; otherwise each group synchronises only its
// threads. dS is overwritten only once P of the next tile is complete. The values group announces
// that P after its last use of dS, and after the gradients group has finished its dq.
//
// This file contains the order of the steps. The steps are in backward_shape.cuh (the numbers of a
// head-dim class, shared memory), _walk.cuh (the q tiles), _loads.cuh, _products.cuh, _scores.cuh
// (P, dS) and _dq.cuh.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM80_BACKWARD_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM80_BACKWARD_CUH_

#include "worker/kernels/cuda/primitives/copy_async.cuh"
#include "worker/kernels/cuda/primitives/reduce.cuh"
#include "worker/kernels/cuda/primitives/shared_tile.cuh"
#include "worker/kernels/cuda/primitives/thread.cuh"
#include "worker/kernels/cuda/primitives/tma.cuh"
#include "worker/kernels/cuda/sm80/backward_dq.cuh"
#include "worker/kernels/cuda/sm80/backward_loads.cuh"
#include "worker/kernels/cuda/sm80/backward_products.cuh"
#include "worker/kernels/cuda/sm80/backward_scores.cuh"
#include "worker/kernels/cuda/sm80/backward_shape.cuh"
#include "worker/kernels/cuda/sm80/backward_walk.cuh"

namespace ringattn::worker::cuda::sm80 {

template <typename ShapeOf>
struct Backward {
  using Shape = ShapeOf;
  using Tile = typename Shape::Tile;
  using ScoreTile = typename Shape::ScoreTile;
  using KvAccumulator = typename Shape::KvAccumulator;
  using Products = BackwardProducts<Shape>;
  using Scores = BackwardScores<Shape>;
  using Dq = BackwardDq<Shape>;

  static __device__ __forceinline__ void Run(const BackwardParams& params, char* shared) {
    const CommonParams& common = params.common;
    // All threads must get the same answer, because otherwise the groups would wait for each other
    // forever.
    if (__syncthreads_or(Stopped(common.stop_word))) return;
    // Read again at each use instead of being kept in registers.
    const BackwardTile& tile = params.tiles[blockIdx.x];
    const int kv_head = blockIdx.y * params.heads_per_block / common.group_size;
    const int64_t batch = blockIdx.z;
    const unsigned block_thread = OpaqueThread();
    const bool gradients = block_thread >= Shape::kGroupThreads;  // which group
    const unsigned thread = block_thread % Shape::kGroupThreads;
    const int lane = thread & 31;
    const int warp = thread >> 5;

    // The values group uses the first operand of each kind (k, q, P, lse), the gradients group the
    // second (v, dout, dS, delta).
    const uint32_t kv_tiles = SharedAddress(shared);
    const uint32_t row_tiles = kv_tiles + 2 * Shape::kKvBytes;  // [q, dout][buffer]
    const uint32_t score_tiles = row_tiles + 4 * Shape::kQBytes;
    // The staged tile is aligned to 1024 bytes, so it comes before the statistics.
    const uint32_t staged = SharedAddress(shared) + Shape::kStagedOffset +
                            (gradients ? 0 : Shape::kGradientsParts * Shape::kPassBytes);
    char* statistics_memory =
        shared + Shape::kStagedOffset + (Shape::kStaged ? Shape::kStagedBytes : 0);
    BackwardSpan* spans =
        reinterpret_cast<BackwardSpan*>(statistics_memory + 4 * Shape::kStatisticsBytes);
    const uint32_t own_kv = kv_tiles + gradients * Shape::kKvBytes;
    const uint32_t own_rows = row_tiles + gradients * 2 * Shape::kQBytes;
    const uint32_t other_rows = row_tiles + !gradients * 2 * Shape::kQBytes;
    const uint32_t own_scores = score_tiles + gradients * Shape::kScoreBytes;
    const uint32_t ds_tile = score_tiles + Shape::kScoreBytes;

    // ldmatrix positions; see the table in primitives/mma.cuh.
    const int score_row = (warp % Shape::kScoreWarps) * 16;
    const int score_column = (warp / Shape::kScoreWarps) * 16;
    const uint32_t score_a = Opaque(own_rows + Tile::Offset(score_row + (lane & 15), lane >> 4));
    const uint32_t score_b = Opaque(
        own_kv + Tile::Offset(score_column + (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1));
    const uint32_t score_position =
        Opaque(ScoreTile::Offset(score_row + (lane & 15), score_column / 8 + (lane >> 4)));
    const uint32_t kv_a =
        Opaque(own_scores + ScoreTile::Offset((lane & 7) + ((lane >> 4) << 3),
                                              (warp % Shape::kKvWarps) * 2 + ((lane >> 3) & 1)));
    const uint32_t kv_b =
        Opaque(other_rows + Tile::Offset(lane & 15, (warp / Shape::kKvWarps) * 2 + (lane >> 4)));
    const uint32_t q_a = Opaque(
        ds_tile + ScoreTile::Offset(
                      (warp % Shape::kQWarps) * 16 + (lane & 8) + Dq::QRowOf(lane & 7), lane >> 4));
    const uint32_t q_b =
        Opaque(kv_tiles + Tile::Offset(lane & 15, (warp / Shape::kQWarps) * 2 + (lane >> 4)));
    const uint32_t staged_position =
        Opaque(staged + Dq::StagedOffset(Dq::QRow(thread), LaneColumn<Shape::kQWarps>(thread)));

    const int64_t kv_row = batch * tile.block_rows + tile.row_begin;
    const BackwardLoads<Shape> loads{params,    gradients,         thread,
                                     row_tiles, statistics_memory, batch};
    loads.StartKv(tile, own_kv, kv_row, kv_head);
    if (block_thread == 0) {
      DescribeSpan(params, tile, 0, spans);
      DescribeSpan(params, tile, 1, spans);
    }
    __syncthreads();
    loads.StartTile(spans[0], 0, 0);

    KvAccumulator sum;  // dV or dK
    Clear(sum);
    int buffer = 0;
    int row = 0;  // of the tile, relative to its span
    int span_number = 0;
    BackwardQTile last{nullptr, 0, 0};
    bool more;
    do {
      WaitCopies<0>();
      if (Shape::kStaged && gradients && thread == 0) WaitBulkReads();
      __syncthreads();  // this tile is complete, and all threads have finished with the last one
      const BackwardSpan* span = spans + span_number % kBackwardSpans;
      const BackwardQTile q_tile{span, row, span->row_count - row};
      const bool masked =
          row < span->full_begin || min(row + Shape::kRows, span->row_count) > span->full_end;
      more = !span->last || q_tile.rows > Shape::kRows;
      const bool first = last.rows == 0;
      if (!first) {
        if (gradients) {
          Dq::template Add<Shape::kValuesPasses, Shape::kQPasses, Shape::kGradientsParts>(
              params, 1, thread, last, batch, q_a, q_b, staged, staged_position);
        } else if (Shape::kStaged && Shape::kValuesPasses > 0) {
          Dq::AddStaged(params, thread, last, batch, Shape::kValuesPasses - 1, staged);
        }
      }
      if (more) {
        const bool same = q_tile.rows > Shape::kRows;
        loads.StartTile(spans[(span_number + !same) % kBackwardSpans],
                        same ? row + Shape::kRows : 0, buffer ^ 1);
      }
      typename Shape::ScoreAccumulator scores;  // S or dP
      Products::ScoreProduct(scores, score_a + buffer * Shape::kQBytes, score_b);
      const float* statistics =
          reinterpret_cast<const float*>(statistics_memory +
                                         (buffer * 2 + gradients) * Shape::kStatisticsBytes) +
          score_row + (lane >> 2);
      const auto mask = [&] {
        if (!masked) return;
        Scores::Mask(scores, params.ranges[span->range], row + score_row + (lane >> 2),
                     score_column + 2 * (lane & 3), tile.rows);
      };
      if (!gradients) {
        // With a softcap the factor for the other group is stored in place of dS, which the last
        // tile's dq still reads.
        if (common.softcap > 0.0f) SyncThreads<Shape::kThreads>(Shape::kDerivativesFree);
        Scores::Exponentials(scores, statistics, ds_tile + score_position, common);
        mask();
        Scores::StoreScores(scores, own_scores + score_position);
        ArriveThreads<Shape::kThreads>(Shape::kProbabilitiesReady);
        if (row == 0 && thread == 0) DescribeSpan(params, tile, span_number + 2, spans);
        if (Shape::kStaged && Shape::kValuesPasses > 0 && thread == 0) WaitBulkReads();
      } else {
        if (common.softcap > 0.0f) ArriveThreads<Shape::kThreads>(Shape::kDerivativesFree);
        SyncThreads<Shape::kThreads>(Shape::kProbabilitiesReady);
        if (Shape::kStaged && !first) {
          Dq::AddStaged(params, thread, last, batch, Shape::kQPasses - 1,
                        staged + Shape::kLastPart);
        }
        Scores::Differentiate(scores, statistics,
                              (common.softcap > 0.0f ? ds_tile : score_tiles) + score_position);
        mask();
        Scores::StoreScores(scores, own_scores + score_position);
        if (Shape::kValuesPasses > 0) ArriveThreads<Shape::kThreads>(Shape::kDerivativesReady);
      }
      SyncThreads<Shape::kGroupThreads>(Shape::kGroupBarrier + gradients);
      Products::KvProduct(sum, kv_a, kv_b + buffer * Shape::kQBytes);
      if (Shape::kValuesPasses > 0 && !gradients) {
        SyncThreads<Shape::kThreads>(Shape::kDerivativesReady);
        Dq::template Add<0, Shape::kValuesPasses, 1>(params, 0, thread, q_tile, batch, q_a, q_b,
                                                     staged, staged_position);
      }
      last = q_tile;
      buffer ^= 1;
      row += Shape::kRows;
      if (q_tile.rows <= Shape::kRows) {
        row = 0;
        ++span_number;
      }
    } while (more);
    if (gradients) {
      if (Shape::kStaged) {
        if (thread == 0) WaitBulkReads();
        SyncThreads<Shape::kGroupThreads>(Shape::kGroupBarrier + 1);
      }
      Dq::template Add<Shape::kValuesPasses, Shape::kQPasses, Shape::kGradientsParts>(
          params, 1, thread, last, batch, q_a, q_b, staged, staged_position);
    }
    if (Shape::kStaged && (gradients || Shape::kValuesPasses > 0)) {
      SyncThreads<Shape::kGroupThreads>(Shape::kGroupBarrier + gradients);
      Dq::AddStaged(params, thread, last, batch,
                    gradients ? Shape::kQPasses - 1 : Shape::kValuesPasses - 1,
                    staged + (gradients ? Shape::kLastPart : 0));
    }
    AddSum(params, tile, gradients, thread, kv_row, kv_head, sum);
    if (Shape::kStaged && thread == 0) WaitBulk();  // shared memory is read until then
  }

 private:
  // Adds dV or dK to the caller's buffer, from row kv_row on.
  static __device__ __forceinline__ void AddSum(const BackwardParams& params,
                                                const BackwardTile& tile, bool gradients,
                                                unsigned thread, int64_t kv_row, int kv_head,
                                                const KvAccumulator& sum) {
    const CommonParams& common = params.common;
    const int columns = gradients ? common.head_dim : common.head_dim_v;
    const int64_t stride = int64_t{common.num_kv_heads} * columns;
    const int row = LaneRow<Shape::kKvWarps>(thread);
    const int column = LaneColumn<Shape::kKvWarps>(thread);
    ReduceTile<Shape::kKvM, 2 * Shape::kKvN, Shape::kKvWarps * 16, Shape::kKvColumnWarps * 16>(
        sum, gradients ? common.softmax_scale : Shape::kUnshift,
        (gradients ? tile.dk : tile.dv) + (kv_row + row) * stride + kv_head * columns + column,
        stride, row, tile.rows, column, columns,
        tile.rows == Shape::kKeys && columns == Shape::kDim);
  }

  static __device__ __forceinline__ void Clear(KvAccumulator& sum) {
#pragma unroll
    for (int m = 0; m < Shape::kKvM; ++m) {
#pragma unroll
      for (int n = 0; n < 2 * Shape::kKvN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[m][n][i] = 0.0f;
      }
    }
  }
};

}  // namespace ringattn::worker::cuda::sm80

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM80_BACKWARD_CUH_
