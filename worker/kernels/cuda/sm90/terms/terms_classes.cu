// Kernels that find the pairs of tiles that segment ids and masks leave empty or full, and that
// store the mask's bits in the order in which threads hold scores.
#include "worker/kernels/cuda/sm90/terms/terms_classes.h"

#include "worker/kernels/cuda/sm90/terms/pair_rules.h"
#include "worker/kernels/cuda/sm90/terms/terms_pairs.cuh"

namespace ringattn::worker::cuda::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kSide = 128;  // keys of a pair
// Blocks that share a tile's pairs when the mask is packed, and when ids are compared; a warp
// processes one pair's ids at a time.
constexpr int kMaskParts = 8;
constexpr int kIdParts = 8;

// Executed by one whole warp.
__device__ __forceinline__ IdSpan SpanOf(const int32_t* ids, int count) {
  IdSpan span;
  for (int i = threadIdx.x & 31; i < count; i += 32) span.Add(ids[i]);
  span.low = __reduce_min_sync(0xffffffff, span.low);
  span.high = __reduce_max_sync(0xffffffff, span.high);
  span.blind = __any_sync(0xffffffff, span.blind);
  return span;
}

// A forward's pairs: the tile's ids are those of queries, the range's ids those of keys.
struct ForwardSide {
  using Params = TermForwardKernelParams;
  static __device__ __forceinline__ const ForwardTile& Tile(const Params& params, int index) {
    return params.forward.tiles[index];
  }
  static __device__ __forceinline__ int RangeRows(const Params& params, int index) {
    return params.forward.ranges[index].row_count;
  }
  static __device__ __forceinline__ IdSpan Own(const Params& params, const ForwardTile& tile,
                                               int64_t batch) {
    return SpanOf(
        params.terms.q_segment_ids + batch * params.forward.common.q_rows + tile.q_row_begin,
        tile.q_rows);
  }
  static __device__ __forceinline__ const int32_t* Other(const Params& params, int index,
                                                         int64_t batch) {
    const KvRange& range = params.forward.ranges[index];
    return params.terms.ranges[index].segment_ids + batch * range.block_rows + range.row_begin;
  }
};

// A backward's pairs: the tile's ids are those of keys, the range's ids those of queries.
struct BackwardSide {
  using Params = TermBackwardKernelParams;
  static __device__ __forceinline__ const BackwardTile& Tile(const Params& params, int index) {
    return params.tiles[index];
  }
  static __device__ __forceinline__ int RangeRows(const Params& params, int index) {
    return params.ranges[index].row_count;
  }
  static __device__ __forceinline__ IdSpan Own(const Params& params, const BackwardTile& tile,
                                               int64_t batch) {
    return SpanOf(params.terms.ranges[tile.range_begin].segment_ids + batch * tile.block_rows +
                      tile.row_begin,
                  tile.rows);
  }
  static __device__ __forceinline__ const int32_t* Other(const Params& params, int index,
                                                         int64_t batch) {
    return params.terms.q_segment_ids + batch * params.common.q_rows +
           params.ranges[index].row_begin;
  }
};

// Grid: tiles, batch, kIdParts. `step`: rows of a range that make one pair.
template <typename Side>
__global__ void __launch_bounds__(kThreads)
    sm90_classify_ids(const __grid_constant__ typename Side::Params params, int32_t step) {
  const auto& tile = Side::Tile(params, blockIdx.x);
  const int64_t batch = blockIdx.y;
  const int warp = threadIdx.x / 32;
  const IdSpan own = Side::Own(params, tile, batch);
  for (int index = tile.range_begin; index < tile.range_end; ++index) {
    const int rows = Side::RangeRows(params, index);
    const int32_t* ids = Side::Other(params, index, batch);
    uint8_t* classes =
        params.pairs.id_classes + batch * params.pairs.pairs + params.pairs.pair_begin[index];
    for (int pair = blockIdx.z * kWarps + warp; pair * step < rows; pair += kIdParts * kWarps) {
      const IdSpan other = SpanOf(ids + pair * step, min(rows - pair * step, step));
      if (threadIdx.x % 32 == 0) classes[pair] = own.Beside(other);
    }
  }
}

// Sorts tiles: a tile's index is the number of tiles that come before it. One block.
constexpr int kSortThreads = 1024;
__global__ void __launch_bounds__(kSortThreads)
    sm90_sort_tiles(const __grid_constant__ TermBackwardKernelParams params, int32_t step,
                    BackwardTile* sorted) {
  __shared__ int32_t work[kMostSortedTiles];  // visible pairs, over all batch rows
  const int lane = threadIdx.x % 32;
  for (int t = threadIdx.x / 32; t < params.tile_count; t += kSortThreads / 32) {
    const BackwardTile& tile = params.tiles[t];
    int count = 0;
    if (tile.range_begin < tile.range_end) {
      const int last = tile.range_end - 1;
      const int begin = params.pairs.pair_begin[tile.range_begin];
      const int end =
          params.pairs.pair_begin[last] + (params.ranges[last].row_count - 1) / step + 1;
      for (int batch = 0; batch < params.common.batch; ++batch) {
        const uint8_t* classes = params.pairs.id_classes + int64_t{batch} * params.pairs.pairs;
#pragma unroll 8
        for (int pair = begin + lane; pair < end; pair += 32) count += classes[pair] & kPairSeen;
      }
    }
    count = __reduce_add_sync(0xffffffff, count);
    if (lane == 0) work[t] = count;
  }
  __syncthreads();
  for (int t = threadIdx.x; t < params.tile_count; t += kSortThreads) {
    const int own = work[t];
    int place = 0;
    for (int i = 0; i < params.tile_count; ++i) place += work[i] > own || (work[i] == own && i < t);
    sorted[place] = params.tiles[t];
  }
}

// Returns whether the mask's rows may be read as words of 32 columns, from `column` on.
__device__ __forceinline__ bool ReadsWords(const TermParams& terms, int64_t column,
                                           int64_t stride) {
  const uint64_t bytes = reinterpret_cast<uintptr_t>(terms.mask) | terms.mask_row_bytes;
  return terms.mask_bits && stride == 1 && column % 32 == 0 && bytes % 4 == 0;
}

// A row of the mask.
struct MaskRow {
  const uint8_t* mask;   // null: the row does not exist
  int64_t first_column;  // column of the row for the first key
  int64_t stride;

  __device__ __forceinline__ MaskRow(const TermParams& terms, const CommonParams& common,
                                     int64_t batch, int head, int64_t plane_row, bool exists,
                                     int64_t column, int64_t column_stride)
      : first_column(column), stride(column_stride) {
    const int64_t plane =
        (terms.mask_per_batch ? batch : 0) * (terms.mask_per_head ? common.num_heads : 1) +
        (terms.mask_per_head ? head : 0);
    mask = exists ? terms.mask + (plane * terms.plane_rows + plane_row) * terms.mask_row_bytes
                  : nullptr;
  }
  // Returns the bits of columns [first, first + 32) below `columns`: bit l is lane l's. Executed by
  // one whole warp.
  __device__ __forceinline__ uint32_t Word(const TermParams& terms, int first, int columns) const {
    const int column = first + (threadIdx.x & 31);
    bool seen = false;
    if (mask != nullptr && column < columns) {
      const int64_t at = first_column + stride * column;
      seen = terms.mask_bits ? (mask[at / 8] >> (at % 8) & 1) != 0 : mask[at] != 0;
    }
    return __ballot_sync(0xffffffff, seen);
  }
  // The same, read by one thread. REQUIRES: ReadsWords.
  __device__ __forceinline__ uint32_t OwnWord(int first, int columns) const {
    if (mask == nullptr || first >= columns) return 0;
    return *reinterpret_cast<const uint32_t*>(mask + (first_column + first) / 8) &
           ColumnsBelow(first, columns);
  }
  // Updates `any` (some pair is visible) and `all` (every existing pair is) for such a word.
  __device__ __forceinline__ void Judge(uint32_t word, int first, int columns, bool& any,
                                        bool& all) const {
    any |= word != 0;
    all &= mask == nullptr || word == ColumnsBelow(first, columns);
  }
};

__device__ __forceinline__ void StoreMaskClass(const PairTables& tables, int64_t pair, bool any,
                                               bool all) {
  const bool some = __syncthreads_or(any);
  const bool whole = __syncthreads_and(all);
  if (threadIdx.x != 0) return;
  tables.mask_classes[pair] = MaskClass(some, whole);
}

// Grid: tiles times planes, kMaskParts. forward.tile_rows queries, packed heads included, by 128
// keys.
__global__ void __launch_bounds__(kThreads)
    sm90_pack_mask_forward(const __grid_constant__ TermForwardKernelParams params) {
  const TermParams& terms = params.terms;
  const CommonParams& common = params.forward.common;
  const ForwardTile& tile = params.forward.tiles[blockIdx.x % params.tiles];
  const int pack = params.forward.head_pack;
  const int packs = terms.mask_per_head ? common.num_heads / pack : 1;
  const int plane = blockIdx.x / params.tiles;
  const int first_head = plane % packs * pack;
  const int64_t batch = plane / packs;
  const int rows = params.forward.tile_rows;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t* const words = static_cast<uint32_t*>(params.pairs.mask_words);
  for (int index = tile.range_begin; index < tile.range_end; ++index) {
    const KvRange& range = params.forward.ranges[index];
    for (int t = blockIdx.y; t * kSide < range.row_count; t += kMaskParts) {
      const int columns = range.row_count - t * kSide;
      const int64_t pair = int64_t{plane} * params.pairs.pairs + params.pairs.pair_begin[index] + t;
      const TermRange& place = terms.ranges[index];
      const int64_t column = place.plane_column + int64_t{params.stride} * (int64_t{t} * kSide);
      bool any = false, all = true;
      const bool by_words = ReadsWords(terms, column, params.stride);
      const auto row_of = [&](int row) {
        return MaskRow(terms, common, batch, first_head + row % pack, place.plane_row + row / pack,
                       row < tile.q_rows * pack, column, params.stride);
      };
      for (int i = by_words ? threadIdx.x : rows * 4; i < rows * 4; i += kThreads) {
        const MaskRow source = row_of(i / 4);
        uint32_t packed = 0;
#pragma unroll
        for (int w = 0; w < kSide / 32; ++w) {
          const uint32_t word = source.OwnWord(w * 32, columns);
          source.Judge(word, w * 32, columns, any, all);
          packed |= PairsOf(word, i % 4) << (8 * w);
        }
        words[pair * rows * 4 + i] = packed;
      }
      for (int row = by_words ? rows : warp; row < rows; row += kWarps) {
        const MaskRow source = row_of(row);
        uint32_t packed = 0;
#pragma unroll
        for (int w = 0; w < kSide / 32; ++w) {
          const uint32_t word = source.Word(terms, w * 32, columns);
          source.Judge(word, w * 32, columns, any, all);
          packed |= PairsOf(word, lane & 3) << (8 * w);
        }
        if (lane < 4) words[(pair * rows + row) * 4 + lane] = packed;
      }
      StoreMaskClass(params.pairs, pair, any, all);
    }
  }
}

// Grid: tiles times planes, kMaskParts. 128 keys by kRows queries; words of kRows / 4 bits.
template <int kRows>
__global__ void __launch_bounds__(kThreads)
    sm90_pack_mask_backward(const __grid_constant__ TermBackwardKernelParams params) {
  const TermParams& terms = params.terms;
  const CommonParams& common = params.common;
  const BackwardTile& tile = params.tiles[blockIdx.x % params.tile_count];
  const int heads = terms.mask_per_head ? common.num_heads : 1;
  const int plane = blockIdx.x / params.tile_count;
  const int64_t batch = plane / heads;
  const int warp = threadIdx.x / 32;
  constexpr int kChunks = kRows / 64;  // of 16 bits in a word
  uint16_t* const words = static_cast<uint16_t*>(params.pairs.mask_words);
  __shared__ uint32_t seen[kRows][kSide / 32];
  for (int index = tile.range_begin; index < tile.range_end; ++index) {
    const QRange& range = params.ranges[index];
    for (int t = blockIdx.y; t * kRows < range.row_count; t += kMaskParts) {
      const int rows = range.row_count - t * kRows;
      const int64_t pair = int64_t{plane} * params.pairs.pairs + params.pairs.pair_begin[index] + t;
      const TermRange& place = terms.ranges[index];
      const int64_t column = place.plane_column;
      bool any = false, all = true;
      const bool by_words = ReadsWords(terms, column, params.stride);
      const auto row_of = [&](int row) {
        return MaskRow(terms, common, batch, plane % heads, place.plane_row + t * kRows + row,
                       row < rows, column, params.stride);
      };
      for (int i = by_words ? threadIdx.x : kRows * 4; i < kRows * 4; i += kThreads) {
        const int row = i / 4, w = i % 4;
        const MaskRow source = row_of(row);
        const uint32_t word = source.OwnWord(w * 32, tile.rows);
        source.Judge(word, w * 32, tile.rows, any, all);
        seen[row][w] = word;
      }
      for (int row = by_words ? kRows : warp; row < kRows; row += kWarps) {
        const MaskRow source = row_of(row);
#pragma unroll
        for (int w = 0; w < kSide / 32; ++w) {
          const uint32_t word = source.Word(terms, w * 32, tile.rows);
          source.Judge(word, w * 32, tile.rows, any, all);
          if (threadIdx.x % 32 == 0) seen[row][w] = word;
        }
      }
      StoreMaskClass(params.pairs, pair, any, all);  // all of `seen` is written as well
      for (int i = threadIdx.x; i < kSide * 4 * kChunks; i += kThreads) {
        const int chunk = i % kChunks, q = i / kChunks % 4, key = i / kChunks / 4;
        uint32_t packed = 0;
#pragma unroll
        for (int bit = 0; bit < 16; ++bit) {
          const int row = chunk * 64 + bit / 2 * 8 + q * 2 + bit % 2;
          packed |= (seen[row][key / 32] >> (key % 32) & 1) << bit;
        }
        words[pair * (kSide * 4 * kChunks) + i] = static_cast<uint16_t>(packed);
      }
      __syncthreads();  // all threads have read `seen`
    }
  }
}

// Computes the order of key tiles at each q tile without empty pairs. Grid: a plane for each batch
// row and head of turns, q tiles.
__global__ void __launch_bounds__(kThreads)
    sm90_pair_turns(const __grid_constant__ OrderedTermBackwardKernelParams params) {
  const TurnParams& turns = params.turns;
  const int tile = blockIdx.y * kThreads + threadIdx.x;
  if (tile >= turns.query_tiles) return;
  const int64_t plane = blockIdx.x;
  const int batch = static_cast<int>(plane / turns.turn_heads);
  const int head = static_cast<int>(plane % turns.turn_heads);
  const PairClasses classes(params.pairs, batch,
                            MaskPlane(params.terms, batch, head, params.common.num_heads));
  int32_t* const target = turns.pair_turns + 2 * plane * params.pairs.pairs;
  const int begin = turns.visit_begins[tile], end = turns.visit_begins[tile + 1];
  int32_t last = 0;
  for (int i = begin; i < end; ++i) {
    const QVisit visit = turns.visits[i];
    if ((classes.Of(visit.pair) & PairClasses::kSeen) == 0) continue;
    target[2 * visit.pair] = last;
    last = visit.number + 1;
  }
  last = 0;
  for (int i = end - 1; i >= begin; --i) {
    const QVisit visit = turns.visits[i];
    if ((classes.Of(visit.pair) & PairClasses::kSeen) == 0) continue;
    target[2 * visit.pair + 1] = last;
    last = visit.number + 1;
  }
}

template <typename Params>
cudaError_t Launch(void (*kernel)(Params), const Params& params, dim3 grid, cudaStream_t stream) {
  void* arguments[] = {const_cast<Params*>(&params)};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, dim3(kThreads), arguments, 0,
                          stream);
}

template <typename Side, typename Params>
cudaError_t LaunchIds(const Params& params, int tiles, int batch, int32_t step,
                      cudaStream_t stream) {
  if (params.pairs.id_classes == nullptr) return cudaSuccess;
  void* arguments[] = {const_cast<Params*>(&params), &step};
  return cudaLaunchKernel(reinterpret_cast<const void*>(&sm90_classify_ids<Side>),
                          dim3(tiles, batch, kIdParts), dim3(kThreads), arguments, 0, stream);
}

}  // namespace

cudaError_t LaunchPairClasses(const TermForwardKernelParams& params, int32_t tile_keys,
                              cudaStream_t stream) {
  const cudaError_t error =
      LaunchIds<ForwardSide>(params, params.tiles, params.forward.common.batch, tile_keys, stream);
  if (error != cudaSuccess || params.pairs.mask_classes == nullptr) return error;
  return Launch(&sm90_pack_mask_forward, params,
                dim3(params.tiles * params.pairs.mask_planes, kMaskParts), stream);
}

cudaError_t LaunchPairClasses(const TermBackwardKernelParams& params, int32_t tile_rows,
                              cudaStream_t stream) {
  const cudaError_t error =
      LaunchIds<BackwardSide>(params, params.tile_count, params.common.batch, tile_rows, stream);
  if (error != cudaSuccess || params.pairs.mask_classes == nullptr) return error;
  return Launch(tile_rows == 64 ? &sm90_pack_mask_backward<64> : &sm90_pack_mask_backward<128>,
                params, dim3(params.tile_count * params.pairs.mask_planes, kMaskParts), stream);
}

cudaError_t LaunchSortedTiles(const TermBackwardKernelParams& params, int32_t tile_rows,
                              BackwardTile* sorted, cudaStream_t stream) {
  void* arguments[] = {const_cast<TermBackwardKernelParams*>(&params), &tile_rows, &sorted};
  return cudaLaunchKernel(reinterpret_cast<const void*>(&sm90_sort_tiles), dim3(1),
                          dim3(kSortThreads), arguments, 0, stream);
}

cudaError_t LaunchPairTurns(const OrderedTermBackwardKernelParams& params, cudaStream_t stream) {
  const TurnParams& turns = params.turns;
  if (turns.pair_turns == nullptr) return cudaSuccess;
  const int blocks = (turns.query_tiles + kThreads - 1) / kThreads;
  return Launch(&sm90_pair_turns, params, dim3(params.common.batch * turns.turn_heads, blocks),
                stream);
}

std::vector<const void*> PairClassEntries() {
  return {reinterpret_cast<const void*>(&sm90_classify_ids<ForwardSide>),
          reinterpret_cast<const void*>(&sm90_classify_ids<BackwardSide>),
          reinterpret_cast<const void*>(&sm90_sort_tiles),
          reinterpret_cast<const void*>(&sm90_pack_mask_forward),
          reinterpret_cast<const void*>(&sm90_pack_mask_backward<64>),
          reinterpret_cast<const void*>(&sm90_pack_mask_backward<128>),
          reinterpret_cast<const void*>(&sm90_pair_turns)};
}

}  // namespace ringattn::worker::cuda::sm90
