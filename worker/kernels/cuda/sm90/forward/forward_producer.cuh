// The producer warp: takes items of work, and loads their q, keys and values by bulk
// tensor copies as stages become free.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_FORWARD_PRODUCER_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_FORWARD_PRODUCER_CUH_

#include "worker/kernels/cuda/primitives/thread.cuh"
#include "worker/kernels/cuda/sm90/forward/forward_shape.cuh"
#include "worker/kernels/cuda/sm90/forward/late_pieces.h"
#include "worker/kernels/cuda/sm90/forward/work_shifts.cuh"
#include "worker/kernels/cuda/sm90/primitives/pipeline.cuh"

namespace ringattn::worker::cuda::sm90 {

template <typename Shape>
struct ForwardProducer {
  // Waits until the next stage of K or V is free. Does not begin the phase of its full barrier.
  static __device__ __forceinline__ void Claim(const RingPosition<Shape::kStages>& position,
                                               uint32_t empty) {
    WaitBarrier(empty + 8 * position.stage, position.phase ^ 1);
  }
  static __device__ __forceinline__ void Load(RingPosition<Shape::kStages>& position,
                                              uint32_t buffers, uint32_t full, const TensorMap* map,
                                              int head, int row, int batch, uint64_t policy) {
    const uint32_t barrier = full + 8 * position.stage;
    ArriveExpecting(barrier, Shape::kKvBytes);
#pragma unroll
    for (int panel = 0; panel < Shape::kPanels; ++panel) {
      CopyBox(buffers + position.stage * Shape::kKvBytes + panel * Shape::kKvPanelBytes, map,
              barrier, panel * kPanelColumns, head, row, batch, policy);
    }
    position.Advance();
  }
  // The same for values, whose inner axis may be keys.
  static __device__ __forceinline__ void LoadValues(RingPosition<Shape::kStages>& position,
                                                    uint32_t shared, const TensorMap* map, int head,
                                                    int row, int batch, uint64_t policy) {
    if constexpr (Shape::kKeysInner) {
      const uint32_t barrier = shared + Shape::kVFull + 8 * position.stage;
      ArriveExpecting(barrier, Shape::kVBytes);
      // Starts at a multiple of 16 keys, as the copy engine requires. Ranges begin at such
      // multiples in their piece, and the piece's values at the multiple before its first row
      // (float8_forward.cc).
      CopyBox(shared + Shape::kV + position.stage * Shape::kKvBytes, map, barrier, row & ~15, head,
              0, batch, policy);
      position.Advance();
    } else {
      Load(position, shared + Shape::kV, shared + Shape::kVFull, map, head, row, batch, policy);
    }
  }

  // Executed by one lane. Returns when the keys of the piece (late_pieces.h) have arrived or the
  // launch is stopped. In the latter case results are unspecified, and the keys' memory may hold
  // any data.
  static __device__ __forceinline__ void AwaitKeys(const ForwardKernelParams& params,
                                                   uint32_t shared, int32_t piece) {
    const uint32_t late = LateOfPiece(piece);
    // The word holds what has arrived. It is in shared memory, because producers of three groups
    // have no register left.
    const uint32_t there = shared + Shape::kSlots + offsetof(WorkSlot, producer_word);
    if (LoadShared(there) >= late) return;
    uint32_t arrived = LoadAcquired(&params.counters->keys);
    while (arrived < late) {
      if (Stopped(params.forward.common.stop_word)) return;
      __nanosleep(100);
      arrived = LoadAcquired(&params.counters->keys);
    }
    FenceBulkCopies();
    StoreShared(there, arrived);
  }

  // Executed by one lane, from the last key to the first. Under a causal mask the blocks then start
  // at different keys and request different lines from the L2 cache (1% at 64K tokens). Values
  // follow their keys one tile late: the consumers also multiply them one tile late, and waiting
  // for a stage of values must not delay the next keys. `policy`: the L2 cache policy of the
  // copies.
  static __device__ __forceinline__ void LoadItem(const ForwardKernelParams& params,
                                                  KeyTile* key_tiles, uint32_t shared,
                                                  int range_begin, int range_end, int kv_head,
                                                  int batch, uint64_t policy,
                                                  RingPosition<Shape::kStages>& k,
                                                  RingPosition<Shape::kStages>& v) {
    int value_piece = -1;
    int value_row = 0;
    const auto load_values = [&] {
      Claim(v, shared + Shape::kVEmpty);
      LoadValues(v, shared, &params.maps[value_piece].v, kv_head, value_row, batch, policy);
    };
#pragma unroll 1
    for (int index = range_end - 1; index >= range_begin; --index) {
      const KvRange& range = params.forward.ranges[index];
      const int piece = Shape::kKeysInner ? range.piece : IndexOfPiece(range.piece);
      const int begin = static_cast<int>(range.row_begin);
      const int count = range.row_count;
      if constexpr (!Shape::kKeysInner) {
        if (range.piece >= params.first_late_piece) AwaitKeys(params, shared, range.piece);
      }
      AcquireMap(&params.maps[piece].k);
      AcquireMap(&params.maps[piece].v);
#pragma unroll 1
      for (int row = (count - 1) / Shape::kKeys * Shape::kKeys; row >= 0; row -= Shape::kKeys) {
        const bool last = index == range_begin && row == 0;
        Claim(k, shared + Shape::kKEmpty);
        int32_t flags = last ? KeyTile::kLast : 0;
        if (row < range.full_begin || row + Shape::kKeys > range.full_end) {
          flags |= KeyTile::kMasked;
        }
        key_tiles[k.stage] = {flags, range.limits.first_lower - row, range.limits.first_upper - row,
                              count - row};
        Load(k, shared + Shape::kK, shared + Shape::kKFull, &params.maps[piece].k, kv_head,
             begin + row, batch, policy);
        if (value_piece >= 0) load_values();
        value_piece = piece;
        value_row = begin + row;
      }
    }
    load_values();
  }

  // Executed by one whole warp.
  static __device__ __forceinline__ void Run(const ForwardKernelParams& params, char* memory,
                                             uint32_t shared) {
    const CommonParams& common = params.forward.common;
    const int lane = threadIdx.x & 31;
    const uint32_t items = static_cast<uint32_t>(params.tiles) * params.heads;
    const uint32_t section_items = static_cast<uint32_t>(params.tiles) * params.section_heads;
    const int pack = params.forward.head_pack;
    const int packs = common.num_heads / pack;
    RingPosition<Shape::kStages> k, v;
    WorkSlot* slots = reinterpret_cast<WorkSlot*>(memory + Shape::kSlots);
    if (lane == 0) slots[0].producer_word = 0;
    uint32_t round = 0;
    constexpr bool kShifts = !Shape::kKeysInner;  // the kernels in e4m3 would spill registers
    uint32_t item = 0;
    if (lane == 0) item = BeginShift<kShifts>(params, slots);
    item = __shfl_sync(0xffffffff, item, 0);
    while (true) {
      // All reads from memory are issued before the wait for q's buffer.
      const bool valid = __shfl_sync(0xffffffff, item < items && !Stopped(common.stop_word), 0);
      uint32_t next = items;
      ForwardTile item_tile;
      int head = 0, batch = 0;
      if (valid) {
        if (lane == 0) next = NextItem<kShifts>(params, slots, items);
        const uint32_t section = item / section_items;
        const int first = section * params.section_heads;
        const uint32_t heads = min(params.section_heads, params.heads - first);
        const uint32_t rest = item - section * section_items;
        const uint32_t tile = rest / heads;
        const int packed_head = first + rest % heads;
        batch = packed_head / packs;
        head = packed_head % packs * pack;
        item_tile = params.forward.tiles[tile];
      }
      WorkSlot& slot = slots[round & 1];
      WaitBarrier(shared + Shape::kQEmpty, (round & 1) ^ 1);
      if (lane == 0) {
        slot.tile = item_tile;
        slot.first_head = head;
        slot.batch = batch;
        slot.valid = valid;
      }
      if (!valid) {
        if (lane == 0) Arrive(shared + Shape::kQFull);
        break;
      }
      const int q_row = static_cast<int>(item_tile.q_row_begin);
      if (lane == 0) {
        ArriveExpecting(shared + Shape::kQFull, params.q_box_bytes * Shape::kPanels);
#pragma unroll
        for (int panel = 0; panel < Shape::kPanels; ++panel) {
          CopyBox(shared + Shape::kQ + panel * Shape::kQPanelBytes, &params.q_map,
                  shared + Shape::kQFull, panel * kPanelColumns, head, q_row, batch, kEvictFirst);
        }
        // Split keys are read by one block or a few, so other data in the cache (tables, code,
        // partial results) is worth more. (The kernels in e4m3 and of d96 would spill registers for
        // this.)
        const bool once = !Shape::kKeysInner && Shape::kDim != 96 && item_tile.partial_slot >= 0;
        const uint64_t policy = once ? kEvictFirst : kEvictLast;
        LoadItem(params, reinterpret_cast<KeyTile*>(memory + Shape::kKeyTiles), shared,
                 item_tile.range_begin, item_tile.range_end, head / common.group_size, batch,
                 policy, k, v);
      }
      __syncwarp();
      item = __shfl_sync(0xffffffff, next, 0);
      ++round;
    }
    // Every block has read the counters for the last time before the last one reaches this code.
    if (lane == 0 &&
        (items > params.shifts.first_blocks || params.first_late_piece != kNoLatePiece)) {
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

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_FORWARD_PRODUCER_CUH_
