// The four warps of the producer group in a backward with score terms. They differ from
// backward_producer.cuh in three ways. All of them skip pairs of tiles that segment ids or a mask
// leave empty. The descriptions for the consumers contain the terms. If each head has a separate
// gradient of the bias, the warps that add dq also store it: it is dS, which is in shared memory
// for dq's product.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_BACKWARD_PRODUCER_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_BACKWARD_PRODUCER_CUH_

#include "worker/kernels/cuda/sm90/backward/backward_producer.cuh"
#include "worker/kernels/cuda/sm90/terms/terms_backward_shape.cuh"
#include "worker/kernels/cuda/sm90/terms/terms_bias.cuh"
#include "worker/kernels/cuda/sm90/terms/terms_pairs.cuh"

namespace ringattn::worker::cuda::sm90 {

template <typename Shape>
struct TermBackwardProducer {
  using Plain = BackwardProducer<Shape>;
  using Position = typename Plain::Position;

  const typename Shape::Params& params;
  char* const memory;     // shared
  const uint32_t shared;  // its address
  const typename Shape::Item item;

  // A q tile; `row` is relative to its range.
  struct Found {
    int range = -1;
    int row = 0;
    int head = 0;
    uint32_t checks = 0;
  };

  // Calls visit(tile, last) for every tile in which some pair may be visible, or for one tile if
  // there is none. Executed by one whole warp, whose lanes examine 32 pairs at a time.
  template <typename Visit>
  __device__ __forceinline__ void Walk(const Visit& visit) const {
    const int begin = item.tile->range_begin, end = item.tile->range_end;
    const int first = item.first_head;
    const int lane = threadIdx.x & 31;
    constexpr uint32_t kClass = Shape::kKeepWords ? PairClasses::kAll : ~0u;
    Found found;
#pragma unroll 1
    for (int head = first; head < first + params.heads_per_block; ++head) {
      const PairClasses classes = ClassesOf(head);
      if constexpr (Shape::kOrdered) {
        const int step = item.descends() ? -1 : 1;
#pragma unroll 1
        for (int n = 0, index = step > 0 ? begin : end - 1; n < end - begin; ++n, index += step) {
          const int& first_pair = params.pairs.pair_begin[index];
          const int tiles = (params.ranges[index].row_count - 1) / Shape::kRows + 1;
          const int last_base = (tiles - 1) / 32 * 32;
#pragma unroll 1
          for (int base = step > 0 ? 0 : last_base; base >= 0 && base <= last_base;
               base += step * 32) {
            const uint32_t own = base + lane < tiles ? classes.Of(first_pair + base + lane) : 0;
            uint32_t seen = __ballot_sync(0xffffffff, own & PairClasses::kSeen);
#pragma unroll 1
            while (seen != 0) {
              const int next = step > 0 ? __ffs(seen) - 1 : 31 - __clz(seen);
              seen &= ~(1u << next);
              if (found.range >= 0) visit(found, false);
              found = {index, (base + next) * Shape::kRows, head,
                       __shfl_sync(0xffffffff, own, next)};
            }
          }
        }
      } else {
#pragma unroll 1
        for (int index = begin; index < end; ++index) {
          // Read from the table for each batch if registers are short.
          const int& first_pair = params.pairs.pair_begin[index];
          const int tiles = (params.ranges[index].row_count - 1) / Shape::kRows + 1;
          uint32_t batch = 0;
#pragma unroll 1
          for (int base = 0; base < tiles; base += 32) {
            if constexpr (!Shape::kKeepWords) {
              batch = base + lane < tiles ? classes.Of(first_pair + base + lane) : 0;
            } else if (base % PairClasses::kBatch == 0) {
              batch = classes.BatchOf(first_pair + base + lane, tiles - base - lane);
            } else {
              batch >>= 4;
            }
            uint32_t seen = __ballot_sync(0xffffffff, batch & PairClasses::kSeen);
#pragma unroll 1
            while (seen != 0) {
              const int next = __ffs(seen) - 1;
              seen &= seen - 1;
              if (found.range >= 0) visit(found, false);
              found = {index, (base + next) * Shape::kRows, head,
                       __shfl_sync(0xffffffff, batch, next) & kClass};
            }
          }
        }
      }
    }
    if (found.range < 0) {
      found = {begin, 0, first, ClassesOf(first).Everything()};
      // No block waits for this tile, because it adds nothing (Add).
      if constexpr (Shape::kOrdered) found.checks &= ~PairClasses::kSeen;
    }
    visit(found, true);
  }
  __device__ __forceinline__ int64_t PlaneOf(int head) const {
    return MaskPlane(params.terms, item.batch, head, params.common.num_heads);
  }
  __device__ __forceinline__ PairClasses ClassesOf(int head) const {
    return {params.pairs, item.batch, PlaneOf(head)};
  }

  __device__ __forceinline__ Plain WithoutTerms() const { return {params, memory, shared, item}; }

  __device__ __forceinline__ void Load() const {
    const bool leads = (threadIdx.x & 31) == 0;
    const int batch = item.batch;
    const int kv_head = item.first_head / params.common.group_size;
    const Plain plain = WithoutTerms();
    if (leads) {
      const SpanMaps& keys = params.key_maps[item.tile->piece];
      AcquireMap(&keys.k);
      AcquireMap(&keys.v);
      plain.Copy(shared + Shape::kK, Shape::kKeyPanelBytes, shared + Shape::kKFull, keys.k, kv_head,
                 static_cast<int>(item.tile->row_begin), batch, kEvictFirst);
    }
    bool first = true;
    int mapped = -1;
    Position at;
    Walk([&](const Found& tile, bool) {
      if (leads) {
        const QRange& range = params.ranges[tile.range];
        const QueryMaps& maps = params.query_maps[range.piece];
        if (tile.range != mapped) {
          AcquireMap(&maps.q);
          AcquireMap(&maps.dout);
          mapped = tile.range;
        }
        const int token = static_cast<int>(range.row_begin) + tile.row;
        WaitBarrier(shared + Shape::kQEmpty + 8 * at.stage, at.phase ^ 1);
        plain.Copy(shared + Shape::kQ + at.stage * Shape::kRowBytes, Shape::kRowPanelBytes,
                   shared + Shape::kQFull + 8 * at.stage, maps.q, tile.head, token, batch,
                   kEvictLast);
        if (first) {  // reads the tile again: keeping it through the walk takes registers
          plain.Copy(shared + Shape::kV, Shape::kKeyPanelBytes, shared + Shape::kVFull,
                     params.key_maps[item.tile->piece].v, kv_head,
                     static_cast<int>(item.tile->row_begin), batch, kEvictFirst);
          first = false;
        }
        WaitBarrier(shared + Shape::kDoutEmpty + 8 * at.stage, at.phase ^ 1);
        plain.Copy(shared + Shape::kDout + at.stage * Shape::kRowBytes, Shape::kRowPanelBytes,
                   shared + Shape::kDoutFull + 8 * at.stage, maps.dout, tile.head, token, batch,
                   kEvictLast);
      }
      at.Advance();
      __syncwarp();
    });
  }

  // ALiBi's part of DescribeTerms if offsets are addends. Call it before DescribeTerms; executed by
  // one whole warp. If all keys are before the tile's rows, or all after them, the distance is
  // linear. If ALiBi also subtracts at most as much from a score as an added lse may be, the rows'
  // part is added to the `lse` of the lane's rows, from which their offsets are computed.
  template <int kCount>
  __device__ __forceinline__ void DescribeAlibi(const Found& tile, float (&lse)[kCount],
                                                TermQueryTile& target) const {
    const TermParams& terms = params.terms;
    float slope = 0.0f, first = 0.0f, step = 0.0f;
    const float stride = static_cast<float>(params.stride);
    if (terms.slopes != nullptr) {
      const TermRange& place = terms.ranges[tile.range];
      const int batch = terms.packed ? place.document : item.batch;
      const int row = terms.slopes_per_batch ? batch * params.common.num_heads : 0;
      slope = terms.slopes[row + tile.head];
      first = static_cast<float>(place.q_position + int64_t{params.stride} * tile.row +
                                 place.shift - place.k_position);
      const float nearest = fmaf(stride, static_cast<float>(1 - Shape::kKeys), first);
      const float last = fmaf(stride, static_cast<float>(Shape::kRows - 1), first);
      if (nearest >= 0.0f) step = slope;
      if (last <= 0.0f) step = -slope;
      if (!(fmaxf(last, -nearest) * fabsf(slope) < kLargestAddedLse)) step = 0.0f;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float away = fmaf(stride, static_cast<float>(i * 32 + (threadIdx.x & 31)), first);
        lse[i] = fmaf(step, away, lse[i]);
      }
    }
    if ((threadIdx.x & 31) == 0) {
      target.slope = slope;
      target.distance = first;
      target.rate = step * stride * kLog2E;
    }
  }

  // Describes a tile to the consumers, in addition to its rows' statistics. Executed by one lane.
  __device__ __forceinline__ void DescribeTerms(const Found& tile, bool last, bool wide, bool steep,
                                                TermQueryTile& target) const {
    const CommonParams& common = params.common;
    const TermParams& terms = params.terms;
    const QRange& range = params.ranges[tile.range];
    const TermRange& place = terms.ranges[tile.range];
    int32_t flags = last ? QueryTile::kLast : 0;
    if (tile.row < range.full_begin ||
        min(tile.row + Shape::kRows, range.row_count) > range.full_end) {
      flags |= QueryTile::kMasked;
    }
    // The bias of missing rows and keys may have any value; their probabilities must be 0.
    if (Shape::kBiased && terms.bias != nullptr &&
        (range.row_count - tile.row < Shape::kRows || item.tile->rows < Shape::kKeys)) {
      flags |= QueryTile::kMasked;
    }
    if (wide) flags |= QueryTile::kWide;
    if (steep) flags |= QueryTile::kSteep;
    if (tile.checks & PairClasses::kCheckIds) flags |= TermQueryTile::kIds;
    if (tile.checks & PairClasses::kCheckMask) flags |= TermQueryTile::kMaskWords;
    if constexpr (Shape::kAddsOffsets) {
      if (target.rate == 0.0f && target.slope != 0.0f) flags |= TermQueryTile::kBent;
    }
    target.flags = flags;
    target.lower = range.limits.first_lower + tile.row;
    target.upper = range.limits.first_upper + tile.row;
    target.rows = range.row_count - tile.row;
    const int64_t pair = PlaneOf(tile.head) * params.pairs.pairs +
                         params.pairs.pair_begin[tile.range] + tile.row / Shape::kRows;
    target.words =
        static_cast<const typename Shape::Word*>(params.pairs.mask_words) + pair * (128 * 4);
    if constexpr (Shape::kAddsOffsets) return;  // DescribeAlibi has written the rest
    target.head = tile.head;
    target.batch_row = terms.packed ? place.document : item.batch;
    target.first_query = place.q_position + int64_t{params.stride} * tile.row;
    target.first_key = place.k_position;
    target.distance = static_cast<float>(target.first_query + place.shift - place.k_position);
    target.slope = 0.0f;
    if (terms.slopes != nullptr) {
      const int64_t slopes = terms.slopes_per_batch ? target.batch_row * common.num_heads : 0;
      target.slope = terms.slopes[slopes + tile.head];
    }
  }

  // Clears rows that saw no key. They may hold any values, which a product must not multiply with a
  // probability of 0. (Their scores are hidden for any value of the products.) Executed by one
  // whole warp; bit i of `keyless` is the lane's row i * 32 + lane.
  __device__ __forceinline__ void ClearRows(uint32_t keyless, const Position& at) const {
    if (!__any_sync(0xffffffff, keyless)) return;
    WaitBarrier(shared + Shape::kQFull + 8 * at.stage, at.phase);
    WaitBarrier(shared + Shape::kDoutFull + 8 * at.stage, at.phase);
#pragma unroll 1
    for (int i = 0; keyless >> i != 0; ++i) {
      if ((keyless >> i & 1) == 0) continue;
      const int offset =
          at.stage * Shape::kRowBytes + (i * 32 + (threadIdx.x & 31)) * kPanelRowBytes;
#pragma unroll 1
      for (int part = 0; part < Shape::kPanels * kPanelRowBytes; part += 16) {
        const int panel = part / kPanelRowBytes * Shape::kRowPanelBytes + part % kPanelRowBytes;
        *reinterpret_cast<uint4*>(memory + Shape::kQ + offset + panel) = {};
        *reinterpret_cast<uint4*>(memory + Shape::kDout + offset + panel) = {};
      }
    }
    FenceBulkReads();
  }

  // Loads the tile's chunks of the bias for both groups as the consumers free the preceding ones.
  // Executed by one lane, after it has described the tile. While it waits, only the next tile's
  // description is delayed, whose memory the same consumers free later.
  __device__ __forceinline__ void LoadBias(const Found& tile,
                                           RingPosition<Shape::kBiasStages>& at) const {
    const TermParams& terms = params.terms;
    const bool wide = terms.bias_dtype == DType::kFloat32;
    const int rows =
        wide ? Shape::template kBiasRows<float> : Shape::template kBiasRows<typename Shape::T>;
    const int plane = BiasPlane(terms, params.common.num_heads, item.batch, tile.head);
    const TermRange& place = terms.ranges[tile.range];
    const int column = BiasColumn(params.bias, place.plane_column);
    const int first = static_cast<int>(place.plane_row) + tile.row;
#pragma unroll 1
    for (int row = 0; row < Shape::kRows; row += rows) {
#pragma unroll 1
      for (int group = 0; group < Shape::kGroups; ++group) {
        const int index = group * Shape::kBiasStages + at.stage;
        const uint32_t full = shared + Shape::kBiasFull + 8 * index;
        const uint32_t target = shared + Shape::kBias + index * Shape::kBiasChunkBytes;
        WaitBarrier(shared + Shape::kBiasEmpty + 8 * index, at.phase ^ 1);
        ArriveExpecting(full, Shape::kBiasChunkBytes);
        CopyBox(target, &params.bias.map, full, column + group * 64, 0, first + row, plane,
                BiasPolicy(params.terms));
        if (wide) {  // 32 keys per panel
          CopyBox(target + Shape::kBiasChunkBytes / 2, &params.bias.map, full,
                  column + group * 64 + 32, 0, first + row, plane, BiasPolicy(params.terms));
        }
      }
      at.Advance();
    }
  }

  // Executed by one whole warp, as in the plain kernel.
  __device__ __forceinline__ void Describe() const {
    const CommonParams& common = params.common;
    const int lane = threadIdx.x & 31;
    if constexpr (Shape::kAddsDeltas) Addends<Shape>::Clear(memory);
    Position at;
    [[maybe_unused]] RingPosition<Shape::kBiasStages> bias_at;
    Walk([&](const Found& tile, bool last) {
      const QRange& range = params.ranges[tile.range];
      const int64_t token = range.row_begin + tile.row;
      const int64_t first = (int64_t{item.batch} * common.num_heads + tile.head) * common.q_rows;
      const int rows = range.row_count - tile.row;
      constexpr int kPerLane = (Shape::kRows + 31) / 32;
      float lse[kPerLane], delta[kPerLane];
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int r = i * 32 + lane;
        lse[i] = r < rows ? params.lse[first + token + r] : NegativeInfinity();
        delta[i] = r < rows ? params.delta[first + token + r] : 0.0f;
      }
      WaitBarrier(shared + Shape::kTileEmpty + 8 * at.stage, at.phase ^ 1);
      float* statistics = reinterpret_cast<float*>(memory + Shape::kRowStatistics) +
                          at.stage * Shape::kStatistics + lane;
      bool wide = false;
      uint32_t without_keys = 0;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const bool keyless = lse[i] == NegativeInfinity();
        wide |= !keyless && IsWide(lse[i]);
        if (keyless && i * 32 + lane < rows) without_keys |= 1u << i;
        if (keyless) delta[i] = 0.0f;
        if constexpr (!Shape::kAddsOffsets) {
          statistics[Shape::kOffsets + i * 32] =
              keyless ? lse[i] : fmaf(lse[i], -kLog2E, static_cast<float>(Shape::kShift));
        }
        if constexpr (!Shape::kAddsDeltas) {
          statistics[Shape::kDeltas + i * 32] = Shape::kUnshift * delta[i];
        }
        statistics[Shape::kLse + i * 32] = lse[i];
      }
      if constexpr (Shape::kAddsOffsets) {
        wide |= !WithoutTerms().Added(lse);
        DescribeAlibi(tile, lse,
                      reinterpret_cast<TermQueryTile*>(memory + Shape::kTermTiles)[at.stage]);
      }
      if (tile.checks & PairClasses::kCheckIds) {
        int32_t* ids =
            reinterpret_cast<int32_t*>(memory + Shape::kIds + at.stage * Shape::kIdBytes) + lane;
        const int32_t* source =
            params.terms.q_segment_ids + item.batch * common.q_rows + token + lane;
#pragma unroll
        for (int i = 0; i < Shape::kRows; i += 32) ids[i] = lane + i < rows ? source[i] : -1;
      }
      wide = __any_sync(0xffffffff, wide);
      bool steep = false;
      if constexpr (Shape::kSteepTiles) steep = WithoutTerms().TakesDeltasOut(delta, statistics);
      if constexpr (Shape::kAddsDeltas) WithoutTerms().WriteAddends(lse, delta, wide, at.stage);
      if (lane == 0) {
        DescribeTerms(tile, last, wide, steep,
                      reinterpret_cast<TermQueryTile*>(memory + Shape::kTermTiles)[at.stage]);
      }
      ClearRows(without_keys, at);
      Arrive(shared + Shape::kTileFull + 8 * at.stage);
      at.Advance();
      if constexpr (Shape::kBiased) {
        if (params.terms.bias != nullptr && lane == 0) LoadBias(tile, bias_at);
        __syncwarp();
      }
    });
  }

  // Returns the turn in which the group's part of the tile's dq may be added: after that of the
  // last preceding key tile with a nonempty pair.
  __device__ __forceinline__ Turn TileTurn(const Found& tile, int group) const {
    const TurnParams& turns = params.turns;
    Turn turn = WithoutTerms().TileTurn(params.ranges[tile.range], tile.row, tile.head, group);
    if (turns.pair_turns == nullptr) return turn;
    const int64_t plane =
        int64_t{item.batch} * turns.turn_heads + (turns.turn_heads > 1 ? tile.head : 0);
    const int64_t pair =
        plane * params.pairs.pairs + params.pairs.pair_begin[tile.range] + tile.row / Shape::kRows;
    turn.wanted = turns.pair_turns[2 * pair + item.turned];
    return turn;
  }

  // Stores the gradient of the bias at a tile's pairs with the keys of consumer group `group`: dS,
  // as the group wrote it to `stage`, or zeros if the tile is not visited. Executed by one whole
  // warp: eight rows at a time, eight keys per lane.
  template <bool kVisited>
  __device__ __forceinline__ void StoreBiasGradient(const Found& tile, int group,
                                                    uint32_t stage) const {
    using T = typename Shape::T;
    const int first = (threadIdx.x & 31) / 8, chunk = threadIdx.x & 7;
    const int key = group * 64 + chunk * 8;
    const int keys = item.tile->rows - key;  // that exist among the lane's keys
    const QRange& range = params.ranges[tile.range];
    const int64_t columns = params.terms.columns;
    const int64_t plane = int64_t{item.batch} * params.common.num_heads + tile.head;
    const TermRange& place = params.terms.ranges[tile.range];
    T* target = static_cast<T*>(params.dbias) + place.plane_column + key +
                (plane * params.terms.plane_rows + place.plane_row + tile.row + first) * columns;
    // The row, among eight, that holds row `first` (BackwardConsumer::KeptRow); row first + 4 is
    // two further.
    const int kept = first / 2 + first % 2 * 4;
    uint32_t source = shared + Shape::kScores + stage * Shape::kScoreBytes +
                      group * Shape::kScorePanelBytes + kept * kPanelRowBytes + (chunk ^ kept) * 16;
    int rows = min(range.row_count - tile.row, Shape::kRows) - first;
#pragma unroll 1
    for (; rows > 0; rows -= 8) {
      uint4 x = {}, y = {};
      if constexpr (kVisited) {
        x = LoadVector(source);
        y = LoadVector((source + 2 * kPanelRowBytes) ^ 32);
      }
      StoreVector(target, x, keys);
      target += 4 * columns;
      if (rows > 4) StoreVector(target, y, keys);
      target += 4 * columns;
      source += 8 * kPanelRowBytes;
    }
  }
  static __device__ __forceinline__ uint4 LoadVector(uint32_t address) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(address));
    return x;
  }
  // Stores the first `count` of eight elements.
  static __device__ __forceinline__ void StoreVector(void* target, uint4 x, int count) {
    if (count >= 8) {
      __stcs(static_cast<uint4*>(target), x);
      return;
    }
    uint16_t* element = static_cast<uint16_t*>(target);
#pragma unroll 1
    for (; count > 0; --count, ++element) {
      *element = static_cast<uint16_t>(x.x);
      x.x = __funnelshift_r(x.x, x.y, 16);
      x.y = __funnelshift_r(x.y, x.z, 16);
      x.z = __funnelshift_r(x.z, x.w, 16);
      x.w >>= 16;
    }
  }

  // The same for a visited tile, once its boxes are staged, in the phase that equals its `stage`.
  // The group may continue afterwards. (Runs before the boxes are added: after the start of the
  // addition, a call took 7% longer. H200, 16K, d128.)
  __device__ __forceinline__ void StoreStaged(const Found& tile, int group, uint32_t stage) const {
    static_assert(Shape::kStages == 2);
    WaitBarrier(shared + Shape::kStagedFull + 8 * group, stage);
    StoreBiasGradient<true>(tile, group, stage);
    __syncwarp();
  }

  // Stores zeros at the pairs of all skipped tiles. Executed by one whole warp.
  __device__ __forceinline__ void StoreZeros(int group) const {
    if (params.pairs.id_classes == nullptr && params.pairs.mask_classes == nullptr) return;
#pragma unroll 1
    for (int n = 0; n < params.heads_per_block; ++n) {
      const int head = item.first_head + n;
      const PairClasses classes = ClassesOf(head);
#pragma unroll 1
      for (int index = item.tile->range_begin; index < item.tile->range_end; ++index) {
        const int first_pair = params.pairs.pair_begin[index];
        const int count = params.ranges[index].row_count;
#pragma unroll 1
        for (int row = 0; row < count; row += Shape::kRows) {
          if (classes.Of(first_pair + row / Shape::kRows) & PairClasses::kSeen) continue;
          StoreBiasGradient<false>({index, row, head}, group, 0);
        }
      }
    }
  }

  // For consumer group `group`: adds dq of every tile, then dv and dk.
  __device__ __forceinline__ void Add(int group) const {
    AddSums(group);
    if constexpr (Shape::kStores) {
      __syncwarp();
      StoreZeros(group);
    }
  }

  __device__ __forceinline__ void AddSums(int group) const {
    const CommonParams& common = params.common;
    const bool leads = (threadIdx.x & 31) == 0;
    const Plain plain = WithoutTerms();
    uint32_t phase = 0;
    int mapped = -1;
    Walk([&](const Found& tile, bool) {
      if constexpr (Shape::kStores) {
        StoreStaged(tile, group, phase);
        if (!leads) phase ^= 1;
      }
      if (leads) {
        const QRange& range = params.ranges[tile.range];
        const TensorMap& map = params.query_maps[range.piece].dq;
        if (tile.range != mapped) AcquireMap(&map);
        mapped = tile.range;
        if constexpr (Shape::kOrdered) {
          const bool seen = tile.checks & PairClasses::kSeen;
          const Turn turn = seen ? TileTurn(tile, group) : Turn{nullptr, 0, 0};
          turn.Await();
          plain.AddStaged(
              map, group, phase, Shape::kDqByRows ? 0 : group * kPanelColumns,
              seen ? common.head_dim : 0, tile.head,
              static_cast<int>(range.row_begin) + tile.row + (Shape::kDqByRows ? group * 64 : 0));
          turn.Pass();
        } else {
          plain.AddStaged(
              map, group, phase, Shape::kDqByRows ? 0 : group * kPanelColumns, common.head_dim,
              tile.head,
              static_cast<int>(range.row_begin) + tile.row + (Shape::kDqByRows ? group * 64 : 0));
        }
      }
      __syncwarp();
    });
    if (!leads) return;
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
    if constexpr (Shape::kOrdered) plain.SumTurn(group).Await();
#pragma unroll 1
    for (int part = 0; part < Shape::kPanels; ++part) {
      plain.AddStaged(maps.dv, group, phase, part * kPanelColumns, common.head_dim_v, kv_head, row);
    }
#pragma unroll 1
    for (int part = 0; part < Shape::kPanels; ++part) {
      plain.AddStaged(maps.dk, group, phase, part * kPanelColumns, common.head_dim, kv_head, row);
    }
    WaitBulk();
    if constexpr (Shape::kOrdered) plain.SumTurn(group).Pass();
  }

  // `warp` is the index in the group, the same in all threads of the warp.
  __device__ __forceinline__ void Run(int warp) const {
    if (warp == 1) {
      Describe();
    } else if (warp == 0) {
      Load();
    } else {
      Add(warp - 2);
    }
  }
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_BACKWARD_PRODUCER_CUH_
