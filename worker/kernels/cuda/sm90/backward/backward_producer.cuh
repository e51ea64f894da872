// The four warps of the producer group. All warps walk the q tiles that see the thread block's
// keys: one range of the table after another, for each query head of the block.
//  warp 0        loads k and v, then q and dout of every tile, by bulk tensor copies
//  warp 1        describes every tile to the consumers: its limits and its rows' statistics
//  warps 2, 3    add the dq, dv and dk that a consumer group has staged to global memory
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_BACKWARD_PRODUCER_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_BACKWARD_PRODUCER_CUH_

#include "worker/kernels/cuda/primitives/numerics.cuh"
#include "worker/kernels/cuda/primitives/score_rule.cuh"
#include "worker/kernels/cuda/primitives/tma.cuh"
#include "worker/kernels/cuda/sm90/backward/backward_addends.cuh"
#include "worker/kernels/cuda/sm90/backward/backward_shape.cuh"
#include "worker/kernels/cuda/sm90/backward/backward_stored_sums.cuh"
#include "worker/kernels/cuda/sm90/backward/backward_turns.cuh"
#include "worker/kernels/cuda/sm90/primitives/pipeline.cuh"

namespace ringattn::worker::cuda::sm90 {

template <typename Shape>
struct BackwardProducer {
  using Position = RingPosition<Shape::kStages>;

  const typename Shape::Params& params;
  char* const memory;     // shared
  const uint32_t shared;  // its address
  const typename Shape::Item item;

  // Calls visit(range, row, head) for every tile.
  template <typename Visit>
  __device__ __forceinline__ void Walk(const Visit& visit) const {
    const int begin = item.tile->range_begin, end = item.tile->range_end;
    const int first = item.first_head;
#pragma unroll 1
    for (int head = first; head < first + params.heads_per_block; ++head) {
      if constexpr (Shape::kOrdered) {
        const int step = item.descends() ? -1 : 1;
#pragma unroll 1
        for (int n = 0, index = step > 0 ? begin : end - 1; n < end - begin; ++n, index += step) {
          const QRange& range = params.ranges[index];
          const int last = (range.row_count - 1) / Shape::kRows * Shape::kRows;
#pragma unroll 1
          for (int row = step > 0 ? 0 : last; row >= 0 && row <= last; row += step * Shape::kRows) {
            visit(range, row, head);
          }
        }
      } else {
#pragma unroll 1
        for (int index = begin; index < end; ++index) {
          const QRange& range = params.ranges[index];
          const int count = range.row_count;
#pragma unroll 1
          for (int row = 0; row < count; row += Shape::kRows) visit(range, row, head);
        }
      }
    }
  }

  // Returns whether an ordered walk enters the range at this tile, the range's last.
  __device__ __forceinline__ bool EntersAtEnd(const QRange& range, int row) const {
    return item.descends() && row + Shape::kRows >= range.row_count;
  }
  // Returns the turn in which consumer group `group`'s part of a tile's dq, or of dk and dv, may be
  // added.
  __device__ __forceinline__ Turn TileTurn(const QRange& range, int row, int head,
                                           int group) const {
    return TurnOf(params, params.turns, item, range, row / Shape::kRows, head, group);
  }
  __device__ __forceinline__ Turn SumTurn(int group) const {
    return TurnOf(params, params.turns, item, group);
  }

  // The walk of a lane that adds in order: calls enter(range, head), then visit(row) for its tiles.
  // Global memory is read in `enter` only, because waiting for a turn invalidates the
  // multiprocessor's cache.
  template <typename Enter, typename Visit>
  __device__ __forceinline__ void WalkRanges(const Enter& enter, const Visit& visit) const {
    const int begin = item.tile->range_begin, end = item.tile->range_end;
    const int step = item.descends() ? -1 : 1;
#pragma unroll 1
    for (int head = item.first_head, heads = params.heads_per_block; heads > 0; --heads, ++head) {
#pragma unroll 1
      for (int left = end - begin, index = step > 0 ? begin : end - 1; left > 0;
           --left, index += step) {
        const QRange& range = params.ranges[index];
        enter(range, head);
        int tiles = (range.row_count + Shape::kRows - 1) / Shape::kRows;
        int row = step > 0 ? 0 : (tiles - 1) * Shape::kRows;
#pragma unroll 1
        for (; tiles > 0; --tiles, row += step * Shape::kRows) visit(row, head);
      }
    }
  }

  __device__ __forceinline__ void Copy(uint32_t target, uint32_t panel_bytes, uint32_t barrier,
                                       const TensorMap& map, int head, int row, int batch,
                                       uint64_t policy) const {
    ArriveExpecting(barrier, Shape::kPanels * panel_bytes);
#pragma unroll
    for (int panel = 0; panel < Shape::kPanels; ++panel) {
      CopyBox(target + panel * panel_bytes, &map, barrier, panel * kPanelColumns, head, row, batch,
              policy);
    }
  }

  // Executed by one lane.
  __device__ __forceinline__ void Load() const {
    const int batch = item.batch;
    const SpanMaps& keys = params.key_maps[item.tile->piece];
    AcquireMap(&keys.k);
    AcquireMap(&keys.v);
    const int kv_head = item.first_head / params.common.group_size;
    const int kv_row = static_cast<int>(item.tile->row_begin);
    Copy(shared + Shape::kK, Shape::kKeyPanelBytes, shared + Shape::kKFull, keys.k, kv_head, kv_row,
         batch, kEvictFirst);
    bool first = true;
    Position at;
    Walk([&](const QRange& range, int row, int head) {
      const QueryMaps& maps = params.query_maps[range.piece];
      if constexpr (Shape::kOrdered) {
        if (EntersAtEnd(range, row)) {
          AcquireMap(&maps.q);
          AcquireMap(&maps.dout);
        }
      }
      if (row == 0) {
        AcquireMap(&maps.q);
        AcquireMap(&maps.dout);
      }
      const int token = static_cast<int>(range.row_begin) + row;
      WaitBarrier(shared + Shape::kQEmpty + 8 * at.stage, at.phase ^ 1);
      Copy(shared + Shape::kQ + at.stage * Shape::kRowBytes, Shape::kRowPanelBytes,
           shared + Shape::kQFull + 8 * at.stage, maps.q, head, token, batch, kEvictLast);
      if (first) {
        Copy(shared + Shape::kV, Shape::kKeyPanelBytes, shared + Shape::kVFull, keys.v, kv_head,
             kv_row, batch, kEvictFirst);
        first = false;
      }
      WaitBarrier(shared + Shape::kDoutEmpty + 8 * at.stage, at.phase ^ 1);
      Copy(shared + Shape::kDout + at.stage * Shape::kRowBytes, Shape::kRowPanelBytes,
           shared + Shape::kDoutFull + 8 * at.stage, maps.dout, head, token, batch, kEvictLast);
      at.Advance();
    });
  }

  // Returns whether the offsets of the lane's rows can be addends of scores.
  template <int kCount>
  __device__ __forceinline__ bool Added(const float (&lse)[kCount]) const {
    const float multiplier = fabsf(params.common.scale_log2);
    bool all = multiplier > kLeastMultiplier && multiplier < kLargestMultiplier;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      all &= lse[i] == NegativeInfinity() || fabsf(lse[i]) < kLargestAddedLse;
    }
    return all;
  }
  // Returns whether the tile is steep (backward_addends.cuh). If so, moves its deltas from the
  // addends to the statistics, which point to the lane's first row. Executed by one whole warp.
  template <int kCount>
  __device__ __forceinline__ bool TakesDeltasOut(float (&delta)[kCount], float* statistics) const {
    bool steep = false;
#pragma unroll
    for (int i = 0; i < kCount; ++i) steep |= !(fabsf(delta[i]) < kLeastSteepDelta);
    steep = __any_sync(0xffffffff, steep);
    if (!steep) return false;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      statistics[Shape::kDeltas + i * 32] = delta[i];
      delta[i] = 0.0f;
    }
    return true;
  }
  // Writes the addends of the lane's rows. The score addends of a wide tile are 0, because its
  // consumers read lse.
  template <int kCount>
  __device__ __forceinline__ void WriteAddends(const float (&lse)[kCount],
                                               const float (&delta)[kCount], bool wide,
                                               int stage) const {
    static_assert(Shape::kRows == kCount * 32);
    char* const row = memory + (threadIdx.x & 31) * 16;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      Addends<Shape>::Write(row + Addends<Shape>::Place(stage, Addend::kDelta) + i * 32 * 16,
                            -delta[i]);
    }
    if constexpr (Shape::kAddsOffsets) {
      const float multiplier = params.common.scale_log2;
      const float inverse = __fdividef(1.0f, multiplier);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float offset = fmaf(lse[i], -kLog2E, static_cast<float>(Shape::kShift));
        float x = offset * inverse;
        x = fmaf(fmaf(-x, multiplier, offset), inverse, x);
        if (lse[i] == NegativeInfinity()) x = copysignf(lse[i], -multiplier);
        if (wide) x = 0.0f;
        Addends<Shape>::Write(row + Addends<Shape>::Place(stage, Addend::kOffset) + i * 32 * 16, x);
      }
    }
    FenceBulkReads();
  }

  // Executed by one whole warp. Rows without keys, and rows past the end, get the offset -inf, so
  // that their probabilities are zero.
  __device__ __forceinline__ void Describe() const {
    const CommonParams& common = params.common;
    const int lane = threadIdx.x & 31;
    int tiles_left = 0;
    for (int index = item.tile->range_begin; index < item.tile->range_end; ++index) {
      tiles_left += (params.ranges[index].row_count + Shape::kRows - 1) / Shape::kRows;
    }
    tiles_left *= params.heads_per_block;
    if constexpr (Shape::kAddsDeltas) Addends<Shape>::Clear(memory);
    Position at;
    Walk([&](const QRange& range, int row, int head) {
      const int64_t first =
          (int64_t{item.batch} * common.num_heads + head) * common.q_rows + range.row_begin + row;
      const int rows = range.row_count - row;
      constexpr int kPerLane = (Shape::kRows + 31) / 32;
      float lse[kPerLane], delta[kPerLane];
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int r = i * 32 + lane;
        lse[i] = r < rows ? params.lse[first + r] : NegativeInfinity();
        delta[i] = r < rows ? params.delta[first + r] : 0.0f;
      }
      WaitBarrier(shared + Shape::kTileEmpty + 8 * at.stage, at.phase ^ 1);
      float* statistics = reinterpret_cast<float*>(memory + Shape::kRowStatistics) +
                          at.stage * Shape::kStatistics + lane;
      bool wide = false;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (i * 32 + lane >= Shape::kRows) continue;
        const bool keyless = lse[i] == NegativeInfinity();
        wide |= !keyless && IsWide(lse[i]);
        if constexpr (!Shape::kAddsOffsets) {
          statistics[Shape::kOffsets + i * 32] =
              keyless ? lse[i] : fmaf(lse[i], -kLog2E, static_cast<float>(Shape::kShift));
        }
        if constexpr (!Shape::kAddsDeltas) {
          statistics[Shape::kDeltas + i * 32] = Shape::kUnshift * delta[i];
        }
        statistics[Shape::kLse + i * 32] = lse[i];
      }
      if constexpr (Shape::kAddsOffsets) wide |= !Added(lse);
      wide = __any_sync(0xffffffff, wide);
      bool steep = false;
      if constexpr (Shape::kSteepTiles) steep = TakesDeltasOut(delta, statistics);
      if constexpr (Shape::kAddsDeltas) WriteAddends(lse, delta, wide, at.stage);
      if (lane == 0) {
        int32_t flags = --tiles_left == 0 ? QueryTile::kLast : 0;
        if (row < range.full_begin || min(row + Shape::kRows, range.row_count) > range.full_end) {
          flags |= QueryTile::kMasked;
        }
        if (wide) flags |= QueryTile::kWide;
        if (steep) flags |= QueryTile::kSteep;
        reinterpret_cast<QueryTile*>(memory + Shape::kTiles)[at.stage] = {
            flags, range.limits.first_lower + row, range.limits.first_upper + row, rows};
      }
      Arrive(shared + Shape::kTileFull + 8 * at.stage);
      at.Advance();
    });
  }

  // Adds the group's staged boxes, once they are full, from `column` on. Columns from `columns` on
  // do not exist.
  __device__ __forceinline__ void AddStaged(const TensorMap& map, int group, uint32_t& phase,
                                            int column, int columns, int head, int row) const {
    WaitBarrier(shared + Shape::kStagedFull + 8 * group, phase);
    phase ^= 1;
    const uint32_t staged = shared + Shape::kStaged + group * Shape::kStagedBytes;
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      if (column + box * 32 < columns) {
        StartTensorAdd(&map, staged + box * Shape::kStagedBoxBytes, column + box * 32, head, row,
                       item.batch);
      }
    }
    CommitBulk();
    WaitBulkReads();
    Arrive(shared + Shape::kStagedEmpty + 8 * group);
  }

  // Executed by one lane for consumer group `group`: dq of every tile, then dv and dk.
  __device__ __forceinline__ void Add(int group) const {
    const CommonParams& common = params.common;
    uint32_t phase = 0;
    if constexpr (Shape::kOrdered) {
      const TensorMap* map = nullptr;
      int first_row = 0;
      Turn turn;
      WalkRanges(
          [&](const QRange& range, int head) {
            map = &params.query_maps[range.piece].dq;
            AcquireMap(map);
            first_row = static_cast<int>(range.row_begin) + (Shape::kDqByRows ? group * 64 : 0);
            turn = TileTurn(range, 0, head, group);
          },
          [&](int row, int head) {
            const Turn own = turn.Of(row / Shape::kRows);
            own.Await();
            AddStaged(*map, group, phase, Shape::kDqByRows ? 0 : group * kPanelColumns,
                      common.head_dim, head, first_row + row);
            own.Pass();
          });
    } else {
      Walk([&](const QRange& range, int row, int head) {
        const TensorMap& map = params.query_maps[range.piece].dq;
        if (row == 0) AcquireMap(&map);
        AddStaged(map, group, phase, Shape::kDqByRows ? 0 : group * kPanelColumns, common.head_dim,
                  head,
                  static_cast<int>(range.row_begin) + row + (Shape::kDqByRows ? group * 64 : 0));
      });
    }
    if constexpr (StoredSums<Shape>::kPossible) {
      if (StoredSums<Shape>::Asked(item)) {
        WaitBulk();
        return;
      }
    }
    const SumMaps& maps = params.sum_maps[item.tile->piece];
    AcquireMap(&maps.dv);
    AcquireMap(&maps.dk);
    const int kv_head = item.first_head / common.group_size;
    const int row = static_cast<int>(item.tile->row_begin) + group * 64;
    if constexpr (Shape::kOrdered) SumTurn(group).Await();
#pragma unroll 1
    for (int part = 0; part < Shape::kPanels; ++part) {
      AddStaged(maps.dv, group, phase, part * kPanelColumns, common.head_dim_v, kv_head, row);
    }
#pragma unroll 1
    for (int part = 0; part < Shape::kPanels; ++part) {
      AddStaged(maps.dk, group, phase, part * kPanelColumns, common.head_dim, kv_head, row);
    }
    WaitBulk();
    if constexpr (Shape::kOrdered) SumTurn(group).Pass();
  }

  // `warp` is the index in the group, the same in all threads of the warp.
  __device__ __forceinline__ void Run(int warp) const {
    if (warp == 1) {
      Describe();
    } else if ((threadIdx.x & 31) == 0) {
      if (warp == 0) {
        Load();
      } else {
        Add(warp - 2);
      }
    }
  }
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_BACKWARD_PRODUCER_CUH_
