// Forward attention on tensor cores by mma.sync (sm_80 and later).
//
// Shapes: q [batch, q_rows, num_heads, head_dim], k and v per block, out as in attention_kernel.h;
// all in global memory of the launching device. One thread block computes one q tile over the
// tile's key ranges. The tile has kRows rows of one head, or of head_pack heads of a group for
// short queries. Keys and values are copied one tile ahead, with one barrier per key tile.
//
// Reason for this shape: shared-memory reads bound an mma.sync kernel first, because a warp rereads
// all of k and v. A warp therefore takes 32 rows, for which the output accumulator leaves room up
// to head_dim 128 (for larger ones see forward_wide.cuh). The products of 16 keys with V are issued
// between the exponentials of the next 16. (Deferring the whole product by a tile, to overlap it
// with the next softmax, is slower: the second set of probabilities leaves no registers to prefetch
// fragments.)
//
// Softmax: raw scores are compared, and the scale is part of one multiply-add before exp2
// (forward_rows.cuh).
//
// This file contains the order of the steps. The steps are in forward_shape.cuh (the numbers of a
// head-dim class), _loads.cuh, _products.cuh, _softmax.cuh and _rows.cuh (scores to probabilities).
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_CUH_

#include "worker/kernels/cuda/primitives/copy_async.cuh"
#include "worker/kernels/cuda/primitives/forward_row.cuh"
#include "worker/kernels/cuda/primitives/thread.cuh"
#include "worker/kernels/cuda/sm80/forward_loads.cuh"
#include "worker/kernels/cuda/sm80/forward_products.cuh"
#include "worker/kernels/cuda/sm80/forward_rows.cuh"
#include "worker/kernels/cuda/sm80/forward_shape.cuh"
#include "worker/kernels/cuda/sm80/forward_softmax.cuh"
#include "worker/kernels/cuda/sm80/q_tile.cuh"

namespace ringattn::worker::cuda::sm80 {

template <typename ShapeOf>
struct Forward {
  using Shape = ShapeOf;
  using T = typename Shape::T;
  using Tile = typename Shape::Tile;
  using Products = ForwardProducts<Shape>;
  using Rows = ForwardRows<Shape>;
  using Output = typename Shape::Output;

  static __device__ __forceinline__ void Run(const ForwardParams& params, char* shared) {
    const CommonParams& common = params.common;
    if (Stopped(common.stop_word)) return;
    const ForwardTile tile = params.tiles[blockIdx.x];
    const int pack = params.head_pack;
    const int first_head = blockIdx.y * pack;
    const int64_t batch = blockIdx.z;
    const unsigned thread = OpaqueThread();
    const int lane = thread & 31;
    const int warp_row = (thread >> 5) * 16 * Shape::kRowTiles;

    const uint32_t q_tile = SharedAddress(shared);
    const uint32_t k_tiles = q_tile + Shape::kQBytes;
    const uint32_t v_tiles = k_tiles + 2 * Shape::kKvBytes;
    // ldmatrix positions; see the table in primitives/mma.cuh.
    const uint32_t q_base = q_tile + Tile::Offset(warp_row + (lane & 15), lane >> 4);
    const uint32_t k_lane = Tile::Offset((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
    const uint32_t v_lane = Tile::Offset(lane & 15, lane >> 4);

    ForwardLoads<Shape> loads(params, tile, thread);
    LoadQTile<T, Shape::kDim, Shape::kRows, Shape::kThreads>(q_tile, params, tile, first_head,
                                                             batch);
    if (loads.more()) {
      loads.OpenRange();
      loads.LoadKeys(k_tiles);
      loads.LoadValues(v_tiles);
    }
    CommitCopies();

    Output output;
    Rows rows;
    typename Shape::QFragments q_fragments;
    ClearAccumulators(output);
    rows.Clear();
    const Transform transform(common);

    int buffer = 0;
    for (int index = tile.range_begin; index < tile.range_end; ++index) {
      const KvRange& range = params.ranges[index];
      const int row_count = range.row_count;
      for (int row = 0; row < row_count; row += Shape::kKeys) {
        WaitCopies<0>();
        __syncthreads();  // this tile is complete, and all threads have finished with the other
                          // buffer
        // Read in every tile: if they were kept during the exponentials, one of them would be
        // spilled and read late.
        const int full_begin = range.full_begin;
        const int full_end = range.full_end;
        const bool more = loads.more();
        if (more) loads.LoadKeys(k_tiles + (buffer ^ 1) * Shape::kKvBytes);
        if (!Shape::kSpreadCopies && more) {
          loads.LoadValues(v_tiles + (buffer ^ 1) * Shape::kKvBytes);
        }
        if (Shape::kQInRegisters && row == 0) Products::LoadQ(q_fragments, q_base);
        typename Shape::Scores scores;
        Products::ScoreProduct(scores, q_fragments, q_base,
                               k_tiles + buffer * Shape::kKvBytes + k_lane);
        if (Shape::kSpreadCopies && more) {
          loads.LoadValues(v_tiles + (buffer ^ 1) * Shape::kKvBytes);
        }
        if (more) CommitCopies();
        if (transform.applies) transform.Apply(scores, common);
        if (row < full_begin || row + Shape::kKeys > full_end) {
          MaskScores<16>(scores, range, warp_row + (lane >> 2), row + 2 * (threadIdx.x & 3), pack);
        }
        rows.Settle(scores, transform.multiplier, output);
        AddValues(output, scores, transform.multiplier, rows,
                  v_tiles + buffer * Shape::kKvBytes + v_lane);
        buffer ^= 1;
      }
    }
    Store(params, warp_row + (lane >> 2), lane, transform.multiplier, rows, output);
  }

 private:
  // Converts the scores to probabilities, 16 keys at a time, between products.
  static __device__ __forceinline__ void AddValues(Output& output,
                                                   const typename Shape::Scores& scores,
                                                   float multiplier, Rows& rows, uint32_t v_base) {
#pragma unroll
    for (int step = 0; step < Shape::kKeySteps; ++step) {
      typename Shape::Probabilities p;
#pragma unroll
      for (int m = 0; m < Shape::kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          Exponentials<T>(scores[m][2 * step + n], n, multiplier, rows.offset[m], rows.sum[m],
                          p[m]);
        }
      }
      Products::ValueProduct(output, p, step, v_base);
    }
  }

  // The epilogue. `row` is the lane's first row in the tile.
  static __device__ __forceinline__ void Store(const ForwardParams& params, int row, int lane,
                                               float multiplier, const Rows& rows,
                                               const Output& output) {
    // Read again instead of being kept in registers.
    uint32_t x = blockIdx.x, y = blockIdx.y, z = blockIdx.z;
    KeepHere(x);
    KeepHere(y);
    KeepHere(z);
    const ForwardTile tile = params.tiles[x];
    const int first_head = y * params.head_pack;
    const int64_t batch = z;
#pragma unroll
    for (int m = 0; m < Shape::kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = QuadSum(rows.sum[m][half]);
        float base = rows.offset[m][half];
        if (rows.wide) base = RowBase::Of(rows.limit[m][half], base, multiplier);
        ForwardRow target(params, tile, first_head, batch, row + m * 16 + half * 8,
                          RowLse(base, sum), sum == 0.0f ? 0.0f : 1.0f / sum);
        __syncwarp();  // all lanes of a row have read the previous lse
        if (!target.exists) continue;
#pragma unroll
        for (int n = 0; n < Shape::kDim / 8; ++n) {
          target.template Store2<T>(n * 8 + (lane & 3) * 2, output[m][n][half * 2],
                                    output[m][n][half * 2 + 1]);
        }
        if ((lane & 3) == 0) target.StoreLse();
      }
    }
  }
};

}  // namespace ringattn::worker::cuda::sm80

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_CUH_
