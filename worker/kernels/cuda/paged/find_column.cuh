// Each thread block of a launch that splits keys derives its work from the rows in device memory.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PAGED_FIND_COLUMN_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_PAGED_FIND_COLUMN_CUH_

#include <cstdint>

#include "worker/kernels/cuda/paged/step_params.h"

namespace ringattn::worker::cuda::paged {

// Where a column begins.
struct ColumnStart {
  int64_t total;     // the line's length; 0: no row has work
  int64_t row_base;  // where the row's part of the line begins
  PagedRow row;
  int32_t row_index;
  int32_t num_rows;
  int32_t plane;
};

// Shared memory of FindColumn.
template <int kThreads>
struct ColumnScratch {
  PagedRow row;
  int64_t warp_costs[kThreads / 32];
  int64_t row_base;
  int32_t row_index;
};

__device__ __forceinline__ PagedRow LoadRow(const PagedRow* rows, int index) {
  static_assert(sizeof(PagedRow) == 2 * sizeof(int4));
  const int4* const source = reinterpret_cast<const int4*>(rows + index);
  const int4 first = source[0];
  const int4 second = source[1];
  PagedRow row;
  row.first_q = first.x;
  row.q_tokens = first.y;
  row.first_append = first.z;
  row.append_tokens = first.w;
  row.keep_length = second.x;
  row.table = second.y;
  row.first_position = second.z;
  return row;
}

// All kThreads threads of the block take part; `column` is the same for all. Ends with a barrier
// of the block. The column has work if total > 0 and column < ColumnDeal(...).columns.
template <int kTileKeys, int kThreads>
__device__ __forceinline__ ColumnStart FindColumn(const StepParams& step, const SplitParams& split,
                                                  int column, ColumnScratch<kThreads>& scratch) {
  // Rows are asked for before it is known how many there are.
  const int per_thread = (step.max_rows + kThreads - 1) / kThreads;
  const int first = static_cast<int>(threadIdx.x) * per_thread;
  PagedRow row;
  if (first < step.max_rows) row = LoadRow(step.rows, first);
  const PagedStep current = *step.step;
  const int num_rows = min(current.num_rows, step.max_rows);
  const int end = min(first + per_thread, num_rows);
  const int64_t first_cost = first < end ? CostOf<kTileKeys>(row, split.rule) : 0;
  int64_t cost = first_cost;
  for (int r = first + 1; r < end; ++r) {
    cost += CostOf<kTileKeys>(LoadRow(step.rows, r), split.rule);
  }
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x / 32;
  int64_t through = cost;  // of the warp's threads up to this one
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int64_t other = __shfl_up_sync(0xffffffff, through, distance);
    if (lane >= distance) through += other;
  }
  if (lane == 31) scratch.warp_costs[warp] = through;
  __syncthreads();
  int64_t total = 0, before = through - cost;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) {
    const int64_t warp_cost = scratch.warp_costs[w];
    if (w < warp) before += warp_cost;
    total += warp_cost;
  }
  const ColumnDeal deal(total, split.max_columns);
  if (total > 0 && column < deal.columns) {
    const int64_t begin = deal.Begin(column);
    if (before <= begin && begin < before + cost) {
      int r = first;
      int64_t base = before, row_cost = first_cost;
      while (begin >= base + row_cost) {
        base += row_cost;
        row = LoadRow(step.rows, ++r);
        row_cost = CostOf<kTileKeys>(row, split.rule);
      }
      scratch.row = row;
      scratch.row_index = r;
      scratch.row_base = base;
    }
  }
  __syncthreads();
  return {total, scratch.row_base, scratch.row, scratch.row_index, num_rows, current.plane};
}

// Calls item(row, row_index, unit, tiles, piece) for each unit of which the column has tiles, in
// order. All threads that call it see the same.
template <int kTileKeys, typename Item>
__device__ __forceinline__ void ForEachPiece(const StepParams& step, const SplitParams& split,
                                             int column, const ColumnStart& start,
                                             const Item& item) {
  if (start.total == 0) return;
  const ColumnDeal deal(start.total, split.max_columns);
  if (column >= deal.columns) return;
  int64_t x = deal.Begin(column);
  const int64_t x_end = deal.Begin(column + 1);
  int64_t base = start.row_base;
  int row_index = start.row_index;
  PagedRow row = start.row;
#pragma unroll 1
  while (true) {
    // On its way while this row's pieces are worked on.
    const PagedRow ahead = LoadRow(step.rows, min(row_index + 1, start.num_rows - 1));
    const int32_t units = UnitsOf(row, split.rule);
    if (units > 0) {
      const TileSpan tiles = UnitTiles<kTileKeys>(row, split.rule);
      const int64_t cost = tiles.count() + kUnitOverhead;
      int32_t unit = static_cast<int32_t>(Quotient(x - base, cost));
#pragma unroll 1
      for (; unit < units && base + unit * cost < x_end; ++unit) {
        const UnitPiece piece = PieceOf(deal, base + unit * cost, tiles.count(), x, x_end);
        if (piece.begin < piece.end) item(row, row_index, unit, tiles, piece);
      }
      base += units * cost;
      x = base;
    }
    if (x >= x_end) break;
    ++row_index;
    row = ahead;
  }
}

}  // namespace ringattn::worker::cuda::paged

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PAGED_FIND_COLUMN_CUH_
