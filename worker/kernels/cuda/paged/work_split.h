// Divides the keys of a batch among thread blocks. Pure arithmetic: the device executes it, and
// tests check it on the host.
//
// Keys are cut into tiles of a fixed number of entries, counted from entry 0 of a sequence; the
// packed rows of a sequence (queries times the heads of a group) are cut into units of at most one
// tile of rows. A unit costs the row's visible key tiles plus kUnitOverhead. The costs of all
// units, one after another, form a line; column c of C takes the line's part [Begin(c), Begin(c +
// 1)). All kv heads divide the line alike, so that thread blocks of one column read the same blocks
// of the cache at about the same time.
//
// Tests: work_split_test.cc.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PAGED_WORK_SPLIT_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PAGED_WORK_SPLIT_H_

#include <cstdint>

#include "worker/kernels/cuda/paged/paged_rows.h"

#ifdef __CUDACC__
#define RINGATTN_PAGED_INLINE __host__ __device__ __forceinline__
#else
#define RINGATTN_PAGED_INLINE inline
#endif

namespace ringattn::worker::cuda::paged {

// The cost of a unit's q, epilogue and merge, in key tiles.
inline constexpr int32_t kUnitOverhead = 1;

// Which entries of a sequence the cache holds: entry p belongs to part
//   (p >> block_shift) % count.
// A part stores its entries without gaps. Local entry e is the part's entry number e, so a block of
// the sequence is a block of the cache, and within one block the two numbers differ by a constant.
struct PartRule {
  int32_t count = 1;  // 1: all entries; the other fields are not read
  int32_t index = 0;
  int32_t block_shift = 0;  // log2 of block_tokens
};

struct MaskRule {
  int32_t causal = 1;
  int32_t window_left = -1;  // -1: all
  PartRule part;
};

// `mask` in a kernel that is compiled for caches of several parts, or for caches of one.
template <bool kParted>
RINGATTN_PAGED_INLINE MaskRule CompiledMask(const MaskRule& mask) {
  MaskRule compiled = mask;
  if constexpr (!kParted) compiled.part = PartRule();
  return compiled;
}

// Entries [begin, end) of a sequence; empty: begin = end = 0.
struct KeySpan {
  int32_t begin = 0;
  int32_t end = 0;
};

// Entries of the row that the cache holds.
RINGATTN_PAGED_INLINE int32_t LengthOf(const PagedRow& row) {
  return row.keep_length + row.append_tokens;
}

// The position of the row's query `q` in the whole sequence.
RINGATTN_PAGED_INLINE int32_t PositionOf(const PagedRow& row, const PartRule& part, int32_t q) {
  return (part.count > 1 ? row.first_position : LengthOf(row) - row.q_tokens) + q;
}

// Local entries in front of entry `position` of the sequence, which is below 2^32.
RINGATTN_PAGED_INLINE int64_t LocalBelow(const PartRule& part, int64_t position) {
  if (position <= 0) return 0;
  if (part.count == 1) return position;
  const uint32_t block = static_cast<uint32_t>(position >> part.block_shift);
  const uint32_t count = static_cast<uint32_t>(part.count);
  const uint32_t round = block / count;
  const uint32_t of_round = block - round * count;
  const uint32_t index = static_cast<uint32_t>(part.index);
  const int64_t block_tokens = int64_t{1} << part.block_shift;
  const int64_t in_round = of_round > index    ? block_tokens
                           : of_round == index ? position & (block_tokens - 1)
                                               : 0;
  return (int64_t{round} << part.block_shift) + in_round;
}

// The place in the sequence of a local entry of local block `block`, less its local number.
RINGATTN_PAGED_INLINE int64_t ShiftOfBlock(const PartRule& part, int32_t block) {
  return (int64_t{block} * (part.count - 1) + part.index) << part.block_shift;
}

// Local entries in front of all that a query at `position` sees, and up to the last one.
RINGATTN_PAGED_INLINE int64_t SeenBegin(const MaskRule& mask, int64_t position) {
  return mask.window_left < 0 ? 0 : LocalBelow(mask.part, position - mask.window_left);
}
RINGATTN_PAGED_INLINE int64_t SeenEnd(const PagedRow& row, const MaskRule& mask, int64_t position) {
  const int64_t length = LengthOf(row);
  if (mask.causal == 0) return length;
  const int64_t end = LocalBelow(mask.part, position + 1);
  return end < length ? end : length;
}

// The local entries that at least one of the row's queries [q_begin, q_end) sees.
RINGATTN_PAGED_INLINE KeySpan VisibleKeys(const PagedRow& row, const MaskRule& mask,
                                          int32_t q_begin, int32_t q_end) {
  const int64_t begin = SeenBegin(mask, PositionOf(row, mask.part, q_begin));
  const int64_t end = SeenEnd(row, mask, PositionOf(row, mask.part, q_end - 1));
  if (begin >= end || q_begin >= q_end) return {0, 0};
  return {static_cast<int32_t>(begin), static_cast<int32_t>(end)};
}

// The local entries that all of the row's queries [q_begin, q_end) see; begin >= end if none.
RINGATTN_PAGED_INLINE KeySpan CommonKeys(const PagedRow& row, const MaskRule& mask, int32_t q_begin,
                                         int32_t q_end) {
  return {static_cast<int32_t>(SeenBegin(mask, PositionOf(row, mask.part, q_end - 1))),
          static_cast<int32_t>(SeenEnd(row, mask, PositionOf(row, mask.part, q_begin)))};
}

// Tiles [begin, end) of a span, in tiles of kTileKeys entries from entry 0. An empty span has one
// tile, so that a thread block writes the results of every query.
struct TileSpan {
  int32_t begin = 0;
  int32_t end = 1;

  RINGATTN_PAGED_INLINE int32_t count() const { return end - begin; }
};
template <int kTileKeys>
RINGATTN_PAGED_INLINE TileSpan TilesOf(const KeySpan& keys) {
  if (keys.begin >= keys.end) return {0, 1};
  return {keys.begin / kTileKeys, (keys.end - 1) / kTileKeys + 1};
}

// Which rows a launch works on, and how it cuts them.
struct UnitRule {
  MaskRule mask;
  int32_t max_q = 0;         // rows of 1 to max_q queries are this launch's work
  int32_t unit_queries = 1;  // queries of one unit
};

// The units of a row that is not the launch's work: 0.
RINGATTN_PAGED_INLINE int32_t UnitsOf(const PagedRow& row, const UnitRule& rule) {
  if (row.q_tokens <= 0 || row.q_tokens > rule.max_q) return 0;
  return (row.q_tokens - 1) / rule.unit_queries + 1;
}

// The tiles of each of the row's units.
template <int kTileKeys>
RINGATTN_PAGED_INLINE TileSpan UnitTiles(const PagedRow& row, const UnitRule& rule) {
  return TilesOf<kTileKeys>(VisibleKeys(row, rule.mask, 0, row.q_tokens));
}

// The row's part of the line.
template <int kTileKeys>
RINGATTN_PAGED_INLINE int64_t CostOf(const PagedRow& row, const UnitRule& rule) {
  const int32_t units = UnitsOf(row, rule);
  if (units == 0) return 0;
  return int64_t{units} * (UnitTiles<kTileKeys>(row, rule).count() + kUnitOverhead);
}

// A number of the unit that no other unit of the step has, below TicketsOf.
RINGATTN_PAGED_INLINE int32_t TicketOf(const PagedRow& row, int32_t row_index, int32_t unit,
                                       int32_t unit_queries) {
  return row.first_q / unit_queries + row_index + unit;
}
RINGATTN_PAGED_INLINE int64_t TicketsOf(int64_t max_total_q, int64_t max_rows,
                                        int64_t unit_queries) {
  return max_total_q / unit_queries + max_rows + 1;
}

// a / b of numbers that are not negative; 64-bit divisions are slow on the device.
RINGATTN_PAGED_INLINE int64_t Quotient(int64_t a, int64_t b) {
  if ((static_cast<uint64_t>(a | b) >> 32) == 0) {
    return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  }
  return a / b;
}

// The division of a line of length `total` among at most `max_columns` columns. No column is
// empty.
struct ColumnDeal {
  int64_t total;
  int32_t columns;

  RINGATTN_PAGED_INLINE ColumnDeal(int64_t line, int32_t max_columns)
      : total(line), columns(line < max_columns ? static_cast<int32_t>(line) : max_columns) {}

  RINGATTN_PAGED_INLINE int64_t Begin(int32_t column) const {
    return Quotient(total * column, columns);
  }
  // The column that holds point x of the line.
  RINGATTN_PAGED_INLINE int32_t ColumnOf(int64_t x) const {
    return static_cast<int32_t>(Quotient((x + 1) * columns - 1, total));
  }
};

// One column's share of one unit: tiles [begin, end), empty where begin = end. A unit that several
// columns share is merged from `pieces` partial results.
struct UnitPiece {
  int32_t begin = 0;  // counted from the unit's first tile
  int32_t end = 0;
  int32_t first_column = 0;
  int32_t pieces = 0;
};

// `base`: where the unit's part of the line begins; `tiles`: of the unit. The column is
// [x_begin, x_end) of the line, and they overlap.
RINGATTN_PAGED_INLINE UnitPiece PieceOf(const ColumnDeal& deal, int64_t base, int32_t tiles,
                                        int64_t x_begin, int64_t x_end) {
  UnitPiece piece;
  const int64_t begin = x_begin > base ? x_begin - base : 0;
  const int64_t end = x_end - base;
  piece.begin = static_cast<int32_t>(begin < tiles ? begin : tiles);
  piece.end = static_cast<int32_t>(end < tiles ? end : tiles);
  piece.first_column = deal.ColumnOf(base);
  piece.pieces = deal.ColumnOf(base + tiles - 1) - piece.first_column + 1;
  return piece;
}

// Where a piece's partial result goes: each column has two slots, one for a unit that an earlier
// column has begun and one for a unit that it begins itself.
RINGATTN_PAGED_INLINE int32_t PartialSlot(int32_t column, bool begins_unit) {
  return column * 2 + (begins_unit ? 1 : 0);
}
// The slot of a unit's piece `index`, from that of piece 0.
RINGATTN_PAGED_INLINE int32_t PieceSlot(int32_t first_slot, int32_t index) {
  return index == 0 ? first_slot : first_slot + 2 * index - 1;
}
// The inverse: the index of the piece in `slot`.
RINGATTN_PAGED_INLINE int32_t PieceIndex(int32_t first_slot, int32_t slot) {
  return (slot - first_slot + 1) / 2;
}
// Slots of all columns; also the largest number of a group of pieces plus 1 (GroupTicketOf).
RINGATTN_PAGED_INLINE int64_t SlotsOf(int64_t max_columns) { return 2 * max_columns; }

// Merging in groups. The thread block that ends last would merge all pieces of a unit alone, which
// takes longer than the keys if one unit occupies the whole GPU. The pieces of such a unit are
// therefore merged in groups of consecutive ones, each by the thread block that ends last in its
// group, and the thread block that ends last of these merges the groups.
struct MergeGroups {
  int32_t size = 1;   // pieces of a group; the last one may have fewer
  int32_t count = 1;  // 1: the pieces are merged at once

  RINGATTN_PAGED_INLINE int32_t PiecesOf(int32_t group, int32_t pieces) const {
    const int32_t rest = pieces - group * size;
    return rest < size ? rest : size;
  }
};

// A merge in groups waits for another ticket and another load from the L2 cache. It is worth that
// if it shortens what thread blocks do one after another by more than so many rows times pieces.
inline constexpr int32_t kMinGroupedGain = 256;

// `rows`: packed ones of the unit; `pieces`: 1 to kMaxSplits. There are about as many groups as
// pieces of a group. All thread blocks of a unit find the same.
RINGATTN_PAGED_INLINE MergeGroups MergeGroupsOf(int32_t rows, int32_t pieces) {
  int32_t size = 1;
  while (size * size < pieces) ++size;
  const MergeGroups groups{size, (pieces - 1) / size + 1};
  const int32_t gain = rows * (pieces - groups.size - groups.count);
  if (gain <= kMinGroupedGain) return {pieces, 1};
  return groups;
}

// The ticket of a group: the slot of its first piece, which no piece of another unit has.
RINGATTN_PAGED_INLINE int32_t GroupTicketOf(int32_t first_slot, const MergeGroups& groups,
                                            int32_t group) {
  return PieceSlot(first_slot, group * groups.size);
}

}  // namespace ringattn::worker::cuda::paged

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PAGED_WORK_SPLIT_H_
