// The producer warps of a forward with score terms. They differ from forward_producer.cuh in two
// ways: they skip pairs of tiles that segment ids or a mask leave empty, and their descriptions for
// the consumers contain the terms. A second warp loads a bias.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_FORWARD_PRODUCER_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_FORWARD_PRODUCER_CUH_

#include "worker/kernels/cuda/primitives/thread.cuh"
#include "worker/kernels/cuda/sm90/forward/forward_producer.cuh"
#include "worker/kernels/cuda/sm90/forward/work_shifts.cuh"
#include "worker/kernels/cuda/sm90/primitives/pipeline.cuh"
#include "worker/kernels/cuda/sm90/terms/terms_bias.cuh"
#include "worker/kernels/cuda/sm90/terms/terms_forward_alibi.cuh"
#include "worker/kernels/cuda/sm90/terms/terms_forward_shape.cuh"
#include "worker/kernels/cuda/sm90/terms/terms_pairs.cuh"

namespace ringattn::worker::cuda::sm90 {

// Executed by one whole warp, whose lanes examine 32 pairs at a time.
template <typename Shape>
struct TermForwardProducer {
  using Plain = ForwardProducer<Shape>;
  using Position = RingPosition<Shape::kStages>;

  const TermForwardKernelParams& params;
  char* const memory;     // shared
  const uint32_t shared;  // its address
  const int lane;
  Position k, v;

  // A key tile; `row` is relative to its range.
  struct Found {
    int range = -1;
    int row = 0;
    uint32_t checks = 0;
  };
  struct Item {
    int range_begin, range_end;
    int kv_head, batch;
    int64_t plane;  // of the mask's tables
    uint32_t last;  // the classes of its last pairs: PairClasses::BatchOf
  };

  __device__ __forceinline__ void LoadValues(const Item& item, const Found& tile) {
    const KvRange& range = params.forward.ranges[tile.range];
    Plain::Claim(v, shared + Shape::kVEmpty);
    Position at = v;
    v.Advance();
    if (lane != 0) return;
    Plain::Load(at, shared + Shape::kV, shared + Shape::kVFull, &params.maps[range.piece].v,
                item.kv_head, static_cast<int>(range.row_begin) + tile.row, item.batch, kEvictLast);
  }

  __device__ __forceinline__ void Describe(const Item& item, const Found& tile, bool last) const {
    const KvRange& range = params.forward.ranges[tile.range];
    const TermRange& place = params.terms.ranges[tile.range];
    if (tile.checks & PairClasses::kCheckIds) {
      int32_t* ids =
          reinterpret_cast<int32_t*>(memory + Shape::kIds + k.stage * Shape::kIdBytes) + lane;
      const int32_t* source =
          place.segment_ids + item.batch * range.block_rows + range.row_begin + tile.row + lane;
#pragma unroll
      for (int i = 0; i < Shape::kKeys; i += 32) {
        ids[i] = tile.row + lane + i < range.row_count ? source[i] : -1;
      }
    }
    if (lane == 0) {
      TermKeyTile& target = reinterpret_cast<TermKeyTile*>(memory + Shape::kTermTiles)[k.stage];
      int32_t flags = last ? KeyTile::kLast : 0;
      if (tile.row < range.full_begin || tile.row + Shape::kKeys > range.full_end) {
        flags |= KeyTile::kMasked;
      }
      if (tile.checks & PairClasses::kCheckIds) flags |= TermKeyTile::kIds;
      if (tile.checks & PairClasses::kCheckMask) flags |= TermKeyTile::kMaskWords;
      target.lower = range.limits.first_lower - tile.row;
      target.upper = range.limits.first_upper - tile.row;
      target.columns = range.row_count - tile.row;
      target.first_key = place.k_position + int64_t{params.stride} * tile.row;
      target.first_query = place.q_position;
      const int64_t distance = place.q_position + place.shift - target.first_key;
      target.flags = flags;
      target.distance = static_cast<float>(distance);
      if constexpr (Shape::kAlibi) {
        reinterpret_cast<AlibiKeyTile*>(memory + Shape::kAlibiTiles)[k.stage] =
            AlibiOffsets<Shape>::Describe(distance, params.stride);
      }
      target.batch_row = params.terms.packed ? place.document : item.batch;
      const int64_t pair = item.plane * params.pairs.pairs + params.pairs.pair_begin[tile.range] +
                           tile.row / Shape::kKeys;
      target.words =
          static_cast<const uint32_t*>(params.pairs.mask_words) + pair * (Shape::kRows * 4);
    }
    __syncwarp();
  }

  // Loads the tile's keys, then the values of the preceding tile: the consumers multiply values one
  // tile late.
  __device__ __forceinline__ void Issue(const Item& item, const Found& tile, const Found& before,
                                        bool last) {
    const KvRange& range = params.forward.ranges[tile.range];
    const SpanMaps& maps = params.maps[range.piece];
    if (lane == 0 && tile.range != before.range) {
      AcquireMap(&maps.k);
      AcquireMap(&maps.v);
    }
    Plain::Claim(k, shared + Shape::kKEmpty);
    Describe(item, tile, last);
    Position at = k;
    k.Advance();
    if (kAllArrive && lane != 0) Arrive(shared + Shape::kKFull + 8 * at.stage);
    if (lane == 0) {
      if (tile.checks & PairClasses::kCheckMask) {
        const uint32_t full = shared + Shape::kKFull + 8 * at.stage;
        ExpectBytes(full, Shape::kWordBytes);
        CopyBytes(shared + Shape::kWords + at.stage * Shape::kWordBytes,
                  reinterpret_cast<const TermKeyTile*>(memory + Shape::kTermTiles)[at.stage].words,
                  Shape::kWordBytes, full);
      }
      Plain::Load(at, shared + Shape::kK, shared + Shape::kKFull, &maps.k, item.kv_head,
                  static_cast<int>(range.row_begin) + tile.row, item.batch, kEvictLast);
    }
    if (before.range >= 0) LoadValues(item, before);
  }

  __device__ __forceinline__ int TilesOf(int range) const {
    return (params.forward.ranges[range].row_count - 1) / Shape::kKeys + 1;
  }

  // Calls visit(tile, last) for all visible tiles of an item, from the last key to the first, or
  // for one tile if there is none. A tile is known to be the last once there is no next one. Every
  // caller gets the same tiles, as producers and consumers require. Executed by one whole warp.
  template <typename Visit>
  __device__ __forceinline__ void Walk(const Item& item, const Visit& visit) const {
    const PairClasses classes(params.pairs, item.batch, item.plane);
    Found found;
#pragma unroll 1
    for (int index = item.range_end - 1; index >= item.range_begin; --index) {
      const int first_pair = params.pairs.pair_begin[index];
      const int tiles = TilesOf(index);
      uint32_t batch = item.last;
      bool loaded = index == item.range_end - 1;
#pragma unroll 1
      for (int base = (tiles - 1) / 32 * 32; base >= 0; base -= 32) {
        const int row = base / 32 % (PairClasses::kBatch / 32);
        if (!loaded) {
          const int first = base - row * 32 + lane;
          batch = classes.BatchOf(first_pair + first, tiles - first);
        }
        loaded = row != 0;
        const uint32_t own = batch >> (4 * row) & PairClasses::kAll;
        uint32_t seen = __ballot_sync(0xffffffff, own & PairClasses::kSeen);
#pragma unroll 1
        while (seen != 0) {
          const int next = 31 - __clz(seen);
          seen ^= 1u << next;
          if (found.range >= 0) visit(found, false);
          found = {index, (base + next) * Shape::kKeys, __shfl_sync(0xffffffff, own, next)};
        }
      }
    }
    if (found.range < 0) found = {item.range_begin, 0, classes.Everything()};
    visit(found, true);
  }

  __device__ __forceinline__ void LoadItem(const Item& item) {
    Found issued;
    Walk(item, [&](const Found& tile, bool last) {
      Issue(item, tile, issued, last);
      issued = tile;
    });
    LoadValues(item, issued);
  }

  // `head` is the first head of a pack.
  __device__ __forceinline__ Item ItemOf(const ForwardTile& tile, int head, int batch) const {
    const CommonParams& common = params.forward.common;
    const int pack = params.forward.head_pack;
    Item item = {tile.range_begin,
                 tile.range_end,
                 head / common.group_size,
                 batch,
                 MaskPlane(params.terms, batch, head / pack, common.num_heads / pack),
                 0};
    const int index = tile.range_end - 1, tiles = TilesOf(index);
    const int first = (tiles - 1) / PairClasses::kBatch * PairClasses::kBatch + lane;
    item.last = PairClasses(params.pairs, batch, item.plane)
                    .BatchOf(params.pairs.pair_begin[index] + first, tiles - first);
    return item;
  }

  __device__ __forceinline__ void Run() {
    const CommonParams& common = params.forward.common;
    const uint32_t items = static_cast<uint32_t>(params.tiles) * params.heads;
    const uint32_t section_items = static_cast<uint32_t>(params.tiles) * params.section_heads;
    const int pack = params.forward.head_pack;
    const int packs = common.num_heads / pack;
    WorkSlot* slots = reinterpret_cast<WorkSlot*>(memory + Shape::kSlots);
    uint32_t round = 0;
    uint32_t item = 0;
    if (lane == 0) item = BeginShift<true>(params, slots);
    item = __shfl_sync(0xffffffff, item, 0);
    while (true) {
      const bool valid = __shfl_sync(0xffffffff, item < items && !Stopped(common.stop_word), 0);
      uint32_t next = items;
      ForwardTile tile;
      int packed_head = 0, batch = 0;
      if (valid) {
        if (lane == 0) next = NextItem<true>(params, slots, items);
        const uint32_t section = item / section_items;
        const int first = section * params.section_heads;
        const uint32_t heads = min(params.section_heads, params.heads - first);
        const uint32_t rest = item - section * section_items;
        packed_head = first + rest % heads;
        batch = packed_head / packs;
        tile = params.forward.tiles[rest / heads];
      }
      const int head = packed_head % packs * pack;
      // All reads from memory are issued before the wait for q's buffer.
      Item own = {};
      if (valid) own = ItemOf(tile, head, batch);
      WorkSlot& slot = slots[round & 1];
      WaitBarrier(shared + Shape::kQEmpty, (round & 1) ^ 1);
      if (lane == 0) {
        slot.tile = tile;
        slot.first_head = head;
        slot.batch = batch;
        slot.valid = valid;
      }
      if (!valid) {
        if (lane == 0) Arrive(shared + Shape::kQFull);
        break;
      }
      if (lane == 0) {
        ArriveExpecting(shared + Shape::kQFull, params.q_box_bytes * Shape::kPanels);
#pragma unroll
        for (int panel = 0; panel < Shape::kPanels; ++panel) {
          CopyBox(shared + Shape::kQ + panel * Shape::kQPanelBytes, &params.q_map,
                  shared + Shape::kQFull, panel * kPanelColumns, head,
                  static_cast<int>(tile.q_row_begin), batch, kEvictFirst);
        }
      }
      LoadItem(own);
      __syncwarp();
      item = __shfl_sync(0xffffffff, next, 0);
      ++round;
    }
    // Every block has read the counter for the last time before the last one reaches this code.
    if (lane == 0 && items > params.shifts.first_blocks) {
      __threadfence();
      if (atomicAdd(&params.counters->finished, 1u) == gridDim.x - 1) {
        params.counters->next = 0;
        params.counters->finished = 0;
      }
    }
  }

  // The second warp, for calls with a bias: loads its panels for the tiles of all items, in the
  // order in which the groups read them. It receives items as the consumers do and also releases q
  // of each. It waits only for consumers, so keys and values never wait for a bias.
  __device__ __forceinline__ void LoadBias() const {
    const TermParams& terms = params.terms;
    const int element = terms.bias_dtype == DType::kFloat32 ? 4 : 2;
    const int panels = Shape::kKeys * element / kPanelRowBytes;
    const WorkSlot* slots = reinterpret_cast<const WorkSlot*>(memory + Shape::kSlots);
    RingPosition<Shape::kBiasStages> at;  // of both groups
#pragma unroll 1
    for (uint32_t round = 0;; ++round) {
      WaitBarrier(shared + Shape::kQFull, round & 1);
      const WorkSlot& slot = slots[round & 1];
      if (slot.valid == 0) break;
      const int head = slot.first_head, batch = slot.batch;
      const int plane = BiasPlane(terms, params.forward.common.num_heads, batch, head);
      Walk(ItemOf(slot.tile, head, batch), [&](const Found& tile, bool) {
        const TermRange& place = terms.ranges[tile.range];
        const int column = BiasColumn(params.bias, place.plane_column) + tile.row;
        const int row = static_cast<int>(place.plane_row);
#pragma unroll 1
        for (int panel = 0; panel < panels; ++panel) {
          if (lane == 0) LoadPanels(at, column + panel * (kPanelRowBytes / element), row, plane);
          at.Advance();
        }
        __syncwarp();
      });
      ArriveWarp(shared + Shape::kQEmpty, lane);  // all lanes have read the slot
    }
  }
  // Loads one panel for each group. Elements outside the bias read as zero and count as copied.
  // Scores of rows and keys outside the tile are not used.
  __device__ __forceinline__ void LoadPanels(const RingPosition<Shape::kBiasStages>& at, int column,
                                             int row, int plane) const {
#pragma unroll
    for (int group = 0; group < Shape::kGroups; ++group) {
      const int index = group * Shape::kBiasStages + at.stage;
      WaitBarrier(shared + Shape::kBiasEmpty + 8 * index, at.phase ^ 1);
      ArriveExpecting(shared + Shape::kBiasFull + 8 * index, Shape::kBiasPanelBytes);
      CopyBox(shared + Shape::kBias + index * Shape::kBiasPanelBytes, &params.bias.map,
              shared + Shape::kBiasFull + 8 * index, column, 0, row + group * 64, plane,
              BiasPolicy(params.terms));
    }
  }
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_FORWARD_PRODUCER_CUH_
