// The producer warp of the decode kernel: walks the column's share of the line and loads q, keys
// and values of each piece.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PAGED_SM90_DECODE_PRODUCER_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_PAGED_SM90_DECODE_PRODUCER_CUH_

#include <cstdint>

#include "worker/kernels/cuda/paged/find_column.cuh"
#include "worker/kernels/cuda/paged/sm90/block_loads.cuh"

namespace ringattn::worker::cuda::paged {

using cuda::sm90::WorkSlot;

// An item is one piece of a unit. WorkSlot::tile has its queries in q; partial_slot, or -1 if the
// unit has no other piece; in range_begin the slot of piece 0; in range_end the number of pieces.
// WorkSlot::valid is 1 + the unit's ticket (TicketOf), or 0 after the last item.
template <typename Shape>
struct DecodeProducer {
  // `split`: CompiledSplit.
  static __device__ __forceinline__ void Run(const DecodeParams& params, const SplitParams& split,
                                             char* memory, uint32_t shared, int column,
                                             int pack_index, const ColumnStart& start) {
    const CommonParams& common = params.forward.common;
    const UnitRule& rule = split.rule;
    const int lane = threadIdx.x & 31;
    const int first_head = pack_index * params.forward.head_pack;
    const int kv_head = first_head / common.group_size;
    WorkSlot* const slots = reinterpret_cast<WorkSlot*>(memory + Shape::kSlots);
    BlockLoader<Shape> loader(params.blocks, params.step, memory, shared, cuda::sm90::kEvictFirst,
                              start.plane);
    uint32_t round = 0;
    // This kernel may start before the append has ended. The new entries are in memory after the
    // wait. All other warps wait for copies of this one. Rows and tables were written before the
    // append, or the thread block has waited for them.
    bool waited = false;
    const auto await_append = [&waited] {
      if (waited) return;
      waited = true;
      asm volatile("griddepcontrol.wait;" ::: "memory");
      cuda::sm90::FenceBulkCopies();
    };
    ForEachPiece<Shape::kKeys>(
        params.step, split, column, start,
        [&](const PagedRow& row, int row_index, int32_t unit, const TileSpan& tiles,
            const UnitPiece& piece) {
          const int32_t first_query = unit * rule.unit_queries;
          const int32_t queries = min(rule.unit_queries, row.q_tokens - first_query);
          const KeySpan keys = VisibleKeys(row, rule.mask, 0, row.q_tokens);
          const int32_t tile_begin = tiles.begin + piece.begin;
          const int32_t tile_end = tiles.begin + piece.end;
          loader.Begin(params.step.tables + row.table, keys, tile_end, kv_head);
          await_append();

          const auto load_queries = [&] {
            WaitBarrier(shared + Shape::kQEmpty, (round & 1) ^ 1);
            if (lane == 0) {
              WorkSlot& slot = slots[round & 1];
              slot.tile.q_row_begin = row.first_q + first_query;
              slot.tile.q_rows = queries;
              slot.tile.partial_slot =
                  piece.pieces > 1 ? PartialSlot(column, piece.begin == 0) : -1;
              slot.tile.range_begin = PartialSlot(piece.first_column, true);
              slot.tile.range_end = piece.pieces;
              slot.first_head = first_head;
              slot.batch = 0;
              slot.valid = 1 + TicketOf(row, row_index, unit, rule.unit_queries);
              ArriveExpecting(shared + Shape::kQFull, params.q_box_bytes * Shape::kPanels);
            }
            __syncwarp();
            if (lane < Shape::kPanels) {
              CopyBox(shared + Shape::kQ + lane * Shape::kQPanelBytes, &params.q_map,
                      shared + Shape::kQFull, lane * kPanelColumns, first_head,
                      row.first_q + first_query, 0, cuda::sm90::kEvictFirst);
            }
          };

          // Values follow their keys one tile late, as the consumers use them.
          KeyPasses<Shape::kKeys> passes(row, rule.mask, keys, first_query, queries, tile_begin,
                                         tile_end);
          int32_t token = 0, first = 0;
          bool begun = false, ended = false;
#pragma unroll 1
          while (!ended) {
            const KeyPass pass = passes.Next();
            const int32_t next_token = loader.TokenOf(pass.first, pass.end);
            loader.ClaimKeys();
            loader.LoadKeys(next_token, pass);
            if (begun) {
              loader.LoadValues(token, first);
            } else {
              load_queries();
            }
            begun = true;
            ended = pass.last;
            token = next_token;
            first = pass.first;
          }
          loader.LoadValues(token, first);
          ++round;
        });
    await_append();  // this grid does not end before the append does
    WaitBarrier(shared + Shape::kQEmpty, (round & 1) ^ 1);
    if (lane == 0) {
      slots[round & 1].valid = 0;
      Arrive(shared + Shape::kQFull);
    }
    loader.EndClearing();
  }
};

}  // namespace ringattn::worker::cuda::paged

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PAGED_SM90_DECODE_PRODUCER_CUH_
