// The producer warp of the prefill kernel: takes items, tiles of a row's queries of one head, and
// loads their q, keys and values.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PAGED_SM90_PREFILL_PRODUCER_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_PAGED_SM90_PREFILL_PRODUCER_CUH_

#include <cstdint>

#include "worker/kernels/cuda/paged/sm90/block_loads.cuh"

namespace ringattn::worker::cuda::paged {

using cuda::sm90::WorkSlot;

template <typename Shape>
struct PrefillProducer {
  static __device__ __forceinline__ int32_t TilesOfRow(const PrefillParams& params, int row,
                                                       int num_rows) {
    if (row >= num_rows) return 0;
    const int32_t q_tokens = params.step.rows[row].q_tokens;
    return q_tokens < params.min_q ? 0 : (q_tokens - 1) / Shape::kRows + 1;
  }

  // The row that the item is in, and the item's index in the row; num_rows after the last item.
  // All lanes of the warp together.
  struct Place {
    int32_t row;
    int32_t index;
  };
  static __device__ __forceinline__ Place Find(const PrefillParams& params, int num_rows,
                                               uint32_t item) {
    const int lane = threadIdx.x & 31;
    const uint32_t heads = params.forward.common.num_heads;
    uint32_t base = 0;
#pragma unroll 1
    for (int first = 0; first < num_rows; first += 32) {
      const uint32_t items = TilesOfRow(params, first + lane, num_rows) * heads;
      uint32_t through = items;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const uint32_t other = __shfl_up_sync(0xffffffff, through, distance);
        if (lane >= distance) through += other;
      }
      const unsigned reached = __ballot_sync(0xffffffff, item < base + through);
      if (reached != 0) {
        const int found = __ffs(reached) - 1;
        const uint32_t before = base + __shfl_sync(0xffffffff, through - items, found);
        return {first + found, static_cast<int32_t>(item - before)};
      }
      base += __shfl_sync(0xffffffff, through, 31);
    }
    return {num_rows, 0};
  }

  // `mask`: CompiledMask.
  static __device__ __forceinline__ void Run(const PrefillParams& params, const MaskRule& mask,
                                             char* memory, uint32_t shared) {
    const CommonParams& common = params.forward.common;
    const int lane = threadIdx.x & 31;
    const int num_rows = min(params.step.step->num_rows, params.step.max_rows);
    WorkSlot* const slots = reinterpret_cast<WorkSlot*>(memory + Shape::kSlots);
    BlockLoader<Shape> loader(params.blocks, params.step, memory, shared, cuda::sm90::kEvictLast,
                              params.step.step->plane);
    uint32_t round = 0;
    uint32_t item = blockIdx.x;
#pragma unroll 1
    while (true) {
      const Place place = Find(params, num_rows, item);
      if (place.row >= num_rows) break;
      uint32_t next = 0;
      if (lane == 0) next = gridDim.x + atomicAdd(&params.counters->next, 1u);
      const PagedRow row = LoadRow(params.step.rows, place.row);
      const int32_t tiles = (row.q_tokens - 1) / Shape::kRows + 1;
      // Heads in sections whose K and V fit in the L2 cache together; within a section the tiles
      // from the last, which sees most keys.
      const int64_t kv_head_bytes =
          int64_t{max(LengthOf(row), 1)} * (common.head_dim + common.head_dim_v) * 2;
      const int32_t section_kv_heads = static_cast<int32_t>(
          max(int64_t{1}, min(int64_t{common.num_kv_heads}, params.section_bytes / kv_head_bytes)));
      const int32_t section_heads = section_kv_heads * common.group_size;
      const int32_t section = place.index / (tiles * section_heads);
      const int32_t section_head = section * section_heads;
      const int32_t heads = min(section_heads, common.num_heads - section_head);
      const int32_t rest = place.index - tiles * section_head;
      const int32_t head = section_head + rest % heads;
      const int32_t first_query = (tiles - 1 - rest / heads) * Shape::kRows;
      const int32_t queries = min(Shape::kRows, row.q_tokens - first_query);
      const KeySpan keys = VisibleKeys(row, mask, first_query, first_query + queries);
      const TileSpan key_tiles = TilesOf<Shape::kKeys>(keys);
      loader.Begin(params.step.tables + row.table, keys, key_tiles.end, head / common.group_size);

      KeyPasses<Shape::kKeys> passes(row, mask, keys, first_query, queries, key_tiles.begin,
                                     key_tiles.end);
      int32_t token = 0, first = 0;
      bool begun = false, ended = false;
#pragma unroll 1
      while (!ended) {
        const KeyPass pass = passes.Next();
        const int32_t next_token = loader.TokenOf(pass.first, pass.end);
        loader.ClaimKeys();
        loader.LoadKeys(next_token, pass);
        if (!begun) {
          WaitBarrier(shared + Shape::kQEmpty, (round & 1) ^ 1);
          if (lane == 0) {
            WorkSlot& slot = slots[round & 1];
            slot.tile.q_row_begin = row.first_q + first_query;
            slot.tile.q_rows = queries;
            slot.tile.partial_slot = -1;
            slot.first_head = head;
            slot.batch = 0;
            slot.valid = 1;
            ArriveExpecting(shared + Shape::kQFull, params.q_box_bytes * Shape::kPanels);
          }
          __syncwarp();
          if (lane < Shape::kPanels) {
            CopyBox(shared + Shape::kQ + lane * Shape::kQPanelBytes, &params.q_map,
                    shared + Shape::kQFull, lane * kPanelColumns, head, row.first_q + first_query,
                    0, cuda::sm90::kEvictFirst);
          }
        } else {
          loader.LoadValues(token, first);
        }
        begun = true;
        ended = pass.last;
        token = next_token;
        first = pass.first;
      }
      loader.LoadValues(token, first);
      ++round;
      item = __shfl_sync(0xffffffff, next, 0);
    }
    WaitBarrier(shared + Shape::kQEmpty, (round & 1) ^ 1);
    if (lane == 0) {
      slots[round & 1].valid = 0;
      Arrive(shared + Shape::kQFull);
    }
    loader.EndClearing();
    // Every block has taken its last item before the last one gets here.
    if (lane == 0) {
      __threadfence();
      if (atomicAdd(&params.counters->finished, 1u) == gridDim.x - 1) {
        params.counters->next = 0;
        params.counters->finished = 0;
      }
    }
  }
};

}  // namespace ringattn::worker::cuda::paged

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PAGED_SM90_PREFILL_PRODUCER_CUH_
