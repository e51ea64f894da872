// The producer of the kernel for few q rows and split keys, which is bound by memory latency. One
// lane requests keys as early as possible. It reads the data of its first item while the barriers
// are initialised. An item's first keys do not wait for q's buffer, and the next item's table entry
// is loaded before the last values.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_SPLIT_FORWARD_PRODUCER_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_SPLIT_FORWARD_PRODUCER_CUH_

#include <cstring>

#include "worker/kernels/cuda/primitives/thread.cuh"
#include "worker/kernels/cuda/sm90/forward/forward_producer.cuh"
#include "worker/kernels/cuda/sm90/forward/split_forward_shape.cuh"

namespace ringattn::worker::cuda::sm90 {

// The data of an item that the producer needs before its first copy, loaded without waiting.
struct SplitItem {
  SplitPart part;
  uint32_t stop;  // the stop word
  int32_t head;   // the first of its pack
  int32_t kv_head;
  int32_t batch;

  __device__ __forceinline__ SplitItem(const SplitForwardParams& params, uint32_t item) {
    const CommonParams& common = params.forward.common;
    const uint32_t heads = params.heads;
    const uint32_t tile = item / heads;
    const uint32_t packed_head = item - tile * heads;
    stop = 0;
    if (common.stop_word != nullptr) {
      asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(stop) : "l"(common.stop_word));
    }
    const char* const source = reinterpret_cast<const char*>(params.parts + tile);
    uint32_t words[16];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[i * 4]), "=r"(words[i * 4 + 1]), "=r"(words[i * 4 + 2]),
                     "=r"(words[i * 4 + 3])
                   : "l"(source + i * 16));
    }
    const uint32_t pack = params.forward.head_pack;
    const uint32_t packs = static_cast<uint32_t>(common.num_heads) / pack;
    batch = packed_head / packs;
    head = (packed_head - batch * packs) * pack;
    kv_head = head / static_cast<uint32_t>(common.group_size);
    memcpy(&part, words, sizeof(part));
  }
};

template <typename Shape>
struct SplitForwardProducer {
  using Loads = ForwardProducer<Shape>;

  static __device__ __forceinline__ KeyRows ReadRows(const KvRange& range) {
    return {static_cast<int32_t>(range.row_begin),
            range.row_count,
            range.full_begin,
            range.full_end,
            range.limits.first_lower,
            range.limits.first_upper,
            range.piece};
  }

  // Counts the parts of a stopped block's items from `item` on, so that tickets are 0 for the next
  // launch.
  static __device__ __forceinline__ void CountStopped(const SplitForwardParams& params,
                                                      uint32_t item, uint32_t items) {
    if (params.tickets == nullptr) return;
    const uint32_t heads = params.heads;
#pragma unroll 1
    while (item < items) {
      const SplitPart& part = params.parts[item / heads];
      if (part.combine >= 0) {
        const CombineTile& combine = params.combines[part.combine];
        atomicInc(params.tickets + part.combine * heads + item % heads,
                  combine.slot_end - combine.slot_begin - 1);
      }
      item = items <= gridDim.x ? items : gridDim.x + atomicAdd(&params.counters->next, 1u);
    }
  }

  // Executed by one lane. `item`: the block's first item.
  static __device__ __forceinline__ void Run(const SplitForwardParams& params, char* memory,
                                             uint32_t shared, SplitItem item) {
    const uint32_t items = static_cast<uint32_t>(params.tiles) * params.heads;
    WorkSlot* slots = reinterpret_cast<WorkSlot*>(memory + Shape::kSlots);
    KeyTile* key_tiles = reinterpret_cast<KeyTile*>(memory + Shape::kKeyTiles);
    RingPosition<Shape::kStages> k, v;
    slots[0].producer_word = 0;
    uint32_t index = blockIdx.x;
#pragma unroll 1
    for (uint32_t round = 0;; ++round) {
      const SplitPart& part = item.part;
      WorkSlot& slot = slots[round & 1];
      const auto await_slot = [&] { WaitBarrier(shared + Shape::kQEmpty, (round & 1) ^ 1); };
      if (index >= items || item.stop != 0) {
        CountStopped(params, index, items);
        await_slot();
        slot.valid = 0;
        Arrive(shared + Shape::kQFull);
        break;
      }
      uint32_t next = 0;
      if (items > gridDim.x) {
        // Not atomicAdd, because the compiler's code for it waits for the result.
        asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;"
                     : "=r"(next)
                     : "l"(&params.counters->next)
                     : "memory");
      }
      const auto load_queries = [&] {
        await_slot();
        slot.tile = part.tile;
        slot.first_head = item.head;
        slot.batch = item.batch;
        slot.valid = 2 + part.combine;
        ArriveExpecting(shared + Shape::kQFull, params.q_box_bytes * Shape::kPanels);
#pragma unroll
        for (int panel = 0; panel < Shape::kPanels; ++panel) {
          CopyBox(shared + Shape::kQ + panel * Shape::kQPanelBytes, &params.q_map,
                  shared + Shape::kQFull, panel * kPanelColumns, item.head,
                  static_cast<int>(part.tile.q_row_begin), item.batch, kEvictFirst);
        }
      };
      const SpanMaps* late_maps = nullptr;
      int late_row = 0;
      const auto load_values = [&] {
        Loads::Claim(v, shared + Shape::kVEmpty);
        Loads::LoadValues(v, shared, &late_maps->v, item.kv_head, late_row, item.batch,
                          kEvictFirst);
      };
      KeyRows rows = part.last;
#pragma unroll 1
      for (int range = part.tile.range_end - 1;;) {
        if (rows.piece >= params.first_late_piece) Loads::AwaitKeys(params, shared, rows.piece);
        const int piece = IndexOfPiece(rows.piece);
        const bool near = piece < kNearMaps;
        const SpanMaps* maps = near ? &params.near_maps[piece] : &params.maps[piece];
        if (!near) {
          AcquireMap(&maps->k);
          AcquireMap(&maps->v);
        }
#pragma unroll 1
        for (int row = (rows.row_count - 1) / Shape::kKeys * Shape::kKeys; row >= 0;
             row -= Shape::kKeys) {
          int32_t flags = range == part.tile.range_begin && row == 0 ? KeyTile::kLast : 0;
          if (row < rows.full_begin || row + Shape::kKeys > rows.full_end) {
            flags |= KeyTile::kMasked;
          }
          Loads::Claim(k, shared + Shape::kKEmpty);
          key_tiles[k.stage] = {flags, rows.first_lower - row, rows.first_upper - row,
                                rows.row_count - row};
          Loads::Load(k, shared + Shape::kK, shared + Shape::kKFull, &maps->k, item.kv_head,
                      rows.row_begin + row, item.batch, kEvictFirst);
          if (late_maps == nullptr) {
            load_queries();
          } else {
            load_values();
          }
          late_maps = maps;
          late_row = rows.row_begin + row;
        }
        if (--range < part.tile.range_begin) break;
        rows = ReadRows(params.forward.ranges[range]);
      }
      index = items > gridDim.x ? gridDim.x + next : items;
      if (index >= items) {
        load_values();
      } else {
        const SplitItem ahead(params, index);
        load_values();
        item = ahead;
      }
    }
    // Every block has read the counters for the last time before the last one reaches this code.
    if (items > gridDim.x || params.first_late_piece != kNoLatePiece) {
      __threadfence();
      if (atomicAdd(&params.counters->finished, 1u) == gridDim.x - 1) {
        params.counters->next = 0;
        params.counters->finished = 0;
        params.counters->keys = 0;
      }
    }
  }
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_SPLIT_FORWARD_PRODUCER_CUH_
