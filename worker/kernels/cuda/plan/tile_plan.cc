#include "worker/kernels/cuda/plan/tile_plan.h"

#include <algorithm>
#include <cassert>
#include <limits>
#include <map>
#include <utility>

namespace ringattn::worker::cuda {
namespace {

int64_t FloorDivide(int64_t a, int64_t b) {
  const int64_t quotient = a / b;
  return quotient - (a % b != 0 && a < 0 ? 1 : 0);
}

int32_t Clamp30(int64_t x) {
  constexpr int64_t kLimit = int64_t{1} << 30;
  return static_cast<int32_t>(std::clamp(x, -kLimit, kLimit));
}

// Row 0 is row `q_row` of q, column 0 is row `k_row` of k.
BandLimits LimitsOf(const Piece& q, int64_t q_row, const Piece& k, int64_t k_row,
                    const Band& band) {
  BandLimits limits;
  const int64_t difference = q.PositionOf(q_row) - k.PositionOf(k_row);
  limits.lower_base = band.lower + difference;
  limits.upper_base = band.upper + difference;
  limits.q_stride = q.stride;
  limits.k_stride = k.stride;
  limits.same_stride = q.stride == k.stride;
  limits.first_lower = Clamp30(-FloorDivide(-limits.lower_base, k.stride));
  limits.first_upper = Clamp30(FloorDivide(limits.upper_base, k.stride));
  return limits;
}

struct BlockSpan {
  size_t block;
  const Piece* piece;
  int32_t index;  // of the piece, over all blocks
};

std::map<int64_t, std::vector<BlockSpan>> KeysByDocument(const std::vector<KvBlock>& blocks) {
  std::map<int64_t, std::vector<BlockSpan>> result;
  int32_t index = 0;
  for (size_t b = 0; b < blocks.size(); ++b) {
    for (const Piece& piece : blocks[b].pieces) {
      if (piece.length > 0) result[piece.document].push_back({b, &piece, index});
      ++index;
    }
  }
  return result;
}

int32_t Narrow(int64_t x) {
  assert(x >= 0 && x <= std::numeric_limits<int32_t>::max());
  return static_cast<int32_t>(x);
}

int64_t KeyTiles(const KvRange& range, int32_t keys) { return (range.row_count + keys - 1) / keys; }

struct WeightedTile {
  ForwardTile tile;
  int64_t weight = 0;  // key tiles
  bool early = false;  // comes before the tiles that are not early
};

// Appends key tiles [tile_begin, tile_end) of `ranges` as separate ranges.
void AppendSlice(const std::vector<KvRange>& ranges, int32_t keys, int64_t tile_begin,
                 int64_t tile_end, std::vector<KvRange>& out) {
  int64_t first = 0;
  for (const KvRange& range : ranges) {
    const int64_t count = KeyTiles(range, keys);
    const int64_t begin = std::max<int64_t>(tile_begin - first, 0);
    const int64_t end = std::min<int64_t>(tile_end - first, count);
    first += count;
    if (begin >= end) continue;
    KvRange part = range;
    const int32_t skip = Narrow(begin * keys);
    part.row_begin += skip;
    part.row_count = std::min<int32_t>(range.row_count, Narrow(end * keys)) - skip;
    part.full_begin = std::max(range.full_begin - skip, 0);
    part.full_end = std::min(range.full_end - skip, part.row_count);
    part.limits.lower_base -= range.limits.k_stride * skip;
    part.limits.upper_base -= range.limits.k_stride * skip;
    part.limits.first_lower = Clamp30(-FloorDivide(-part.limits.lower_base, part.limits.k_stride));
    part.limits.first_upper = Clamp30(FloorDivide(part.limits.upper_base, part.limits.k_stride));
    out.push_back(part);
  }
}

// A q tile with all its ranges, before its keys are split.
struct Draft {
  int64_t q_row_begin = 0;
  int32_t q_rows = 0;
  std::vector<KvRange> ranges;  // the latest first
  int64_t key_tiles = 0;
  // By arrival of late keys: the key tiles that come with it or later.
  std::vector<int64_t> tiles_from;
  int64_t parts = 1;   // splits of its keys, of about equal length
  bool early = false;  // its tiles without late keys come before all others

  // The key tiles that come before an arrival, counted from 0.
  int64_t TilesBefore(size_t arrival) const { return key_tiles - tiles_from[arrival]; }
  // They come first in `ranges`.
  int64_t late_tiles() const { return tiles_from.empty() ? 0 : tiles_from[0]; }
  int64_t own_tiles() const { return key_tiles - late_tiles(); }
};

// Appends the range of keys that q rows [begin, end) of the piece see, from a multiple of
// `key_align` on. Appends none if they see no key.
void AppendRange(const Piece& q, int64_t begin, int64_t end, const BlockSpan& keys,
                 const KvBlock& block, const Band& band, int32_t key_align,
                 std::vector<KvRange>& ranges) {
  RowRange reach = ReachableKeys(q, begin, end, *keys.piece, band);
  if (reach.empty()) return;
  reach.begin -= reach.begin % key_align;
  const RowRange full = FullyVisibleKeys(q, begin, end, *keys.piece, band);
  KvRange range;
  range.k = block.k;
  range.v = block.v;
  range.block_rows = block.rows;
  range.piece = keys.index;
  range.row_begin = keys.piece->local_begin + reach.begin;
  range.row_count = Narrow(reach.size());
  range.limits = LimitsOf(q, begin, *keys.piece, reach.begin, band);
  if (!full.empty()) {
    range.full_begin = Narrow(std::max<int64_t>(full.begin - reach.begin, 0));
    range.full_end = Narrow(std::min(full.end, reach.end) - reach.begin);
  }
  ranges.push_back(range);
}

std::vector<Draft> DraftTiles(const ForwardCall& call, const ForwardTileShape& shape) {
  const auto keys_by_document = KeysByDocument(call.blocks);
  const int32_t arrivals = call.has_late_keys() ? call.blocks.back().late : 0;
  std::vector<Draft> drafts;
  for (const Piece& q : call.q_pieces) {
    const auto found = keys_by_document.find(q.document);
    for (int64_t begin = 0; begin < q.length; begin += shape.q_rows) {
      const int64_t end = std::min<int64_t>(begin + shape.q_rows, q.length);
      Draft draft{q.local_begin + begin, Narrow(end - begin), {}};
      if (found != keys_by_document.end()) {
        const Band& band = call.problem->bands[q.document];
        draft.tiles_from.resize(arrivals);
        for (int32_t late = arrivals; late >= 0; --late) {
          for (const BlockSpan& keys : found->second) {
            const KvBlock& block = call.blocks[keys.block];
            if (block.late != late) continue;
            AppendRange(q, begin, end, keys, block, band, shape.key_align, draft.ranges);
          }
          draft.key_tiles = 0;
          for (const KvRange& range : draft.ranges) draft.key_tiles += KeyTiles(range, shape.keys);
          if (late > 0) draft.tiles_from[late - 1] = draft.key_tiles;
        }
      } else {
        draft.tiles_from.resize(arrivals);
      }
      if (draft.ranges.empty() && !call.initial && !call.final) continue;
      drafts.push_back(std::move(draft));
    }
  }
  return drafts;
}

// With fewer key tiles, combining partial results costs more than it saves.
constexpr int64_t kMinimalTiles = 4;

// Splits keys where too few blocks would run.
void FillBlocks(const ForwardTileShape& shape, std::vector<Draft>& drafts) {
  int64_t total = 0;
  for (const Draft& draft : drafts) total += draft.key_tiles;
  const int64_t blocks = static_cast<int64_t>(drafts.size()) * shape.blocks_per_tile;
  if (shape.target_blocks <= 0 || blocks <= 0 || blocks * 10 >= shape.target_blocks * 8) return;
  const int64_t parts =
      std::max<int64_t>(shape.target_blocks / std::max<int64_t>(shape.blocks_per_tile, 1), 1);
  const int64_t part_tiles = std::max(kMinimalTiles, (total + parts - 1) / parts);
  for (Draft& draft : drafts) {
    draft.parts = std::max<int64_t>((draft.key_tiles + part_tiles - 1) / part_tiles, 1);
  }
}

bool AnySplit(const std::vector<Draft>& drafts) {
  return std::any_of(drafts.begin(), drafts.end(),
                     [](const Draft& draft) { return draft.parts > 1; });
}

// Returns the drafts that run first among those that are not early: the longest, as many as run at
// a time.
std::vector<Draft*> Starters(const ForwardTileShape& shape, std::vector<Draft>& drafts) {
  std::vector<Draft*> starters;
  for (Draft& draft : drafts) starters.push_back(&draft);
  const int64_t blocks = std::max<int64_t>(shape.blocks_per_tile, 1);
  const auto count = std::min<int64_t>((shape.blocks_at_once + blocks - 1) / blocks,
                                       static_cast<int64_t>(starters.size()));
  std::stable_sort(starters.begin(), starters.end(),
                   [](const Draft* a, const Draft* b) { return a->key_tiles > b->key_tiles; });
  starters.resize(count);
  return starters;
}

// Returns the key tiles per head that are missing before an arrival of late keys. The starters
// process their other keys first.
double MissingBefore(size_t arrival, const ForwardTileShape& shape,
                     const std::vector<Draft*>& starters) {
  const auto wanted = static_cast<double>(shape.early_key_tiles[arrival]);
  if (starters.empty()) return wanted;
  int64_t least = starters.front()->TilesBefore(arrival);
  for (const Draft* draft : starters) least = std::min(least, draft->TilesBefore(arrival));
  return wanted - static_cast<double>(least * shape.blocks_at_once) /
                      static_cast<double>(std::max<int64_t>(shape.blocks_per_tile, 1));
}

// Marks drafts as early until there is enough work without late keys before the kernel waits for
// any of them (ForwardTileShape::early_key_tiles). Drafts without late keys come first. Then follow
// those with the most other keys, which are split. The longest drafts come first.
void MarkEarly(const ForwardTileShape& shape, std::vector<Draft>& drafts) {
  if (drafts.empty() || shape.early_key_tiles.size() > drafts.front().tiles_from.size()) return;
  const std::vector<Draft*> starters = Starters(shape, drafts);
  double wanted = 0;
  for (size_t arrival = 0; arrival < shape.early_key_tiles.size(); ++arrival) {
    wanted = std::max(wanted, MissingBefore(arrival, shape, starters));
  }
  if (wanted <= 0) return;
  std::vector<Draft*> candidates;
  for (Draft& draft : drafts) {
    const bool starts = std::find(starters.begin(), starters.end(), &draft) != starters.end();
    if (draft.own_tiles() > 0 && !starts) candidates.push_back(&draft);
  }
  std::stable_sort(candidates.begin(), candidates.end(), [](const Draft* a, const Draft* b) {
    if ((a->late_tiles() == 0) != (b->late_tiles() == 0)) return a->late_tiles() == 0;
    return a->own_tiles() > b->own_tiles();
  });
  for (Draft* draft : candidates) {
    if (wanted <= 0) return;
    draft->early = true;
    wanted -= static_cast<double>(draft->own_tiles());
  }
}

// Tiles of equal length run in waves, and the last wave may leave most multiprocessors idle: 4,096
// items on 132 multiprocessors are 31.03 waves. This function splits the keys of so many of the
// last tiles that the unsplit ones fill the waves before it. The splits run wherever
// a multiprocessor is free.
void ShortenLastWave(const ForwardTileShape& shape, std::vector<Draft>& drafts) {
  constexpr int64_t kParts = 4;
  constexpr int64_t kMostPartialItems = 1024;  // 64 KiB of scratch memory each, at head_dim 128
  // In key tiles (1.7 us): the launch that combines the partials, and the traffic of one partial
  // through memory, shared by all multiprocessors.
  constexpr double kCombineCost = 4, kPartCost = 0.026;
  const int64_t at_once = shape.blocks_at_once;
  const int64_t tiles = static_cast<int64_t>(drafts.size());
  const int64_t items = tiles * shape.blocks_per_tile;
  if (at_once <= 0 || items <= at_once) return;
  int64_t total = 0, longest = 0;
  for (const Draft& draft : drafts) {
    total += draft.key_tiles;
    longest = std::max(longest, draft.key_tiles);
  }
  const bool even = longest * tiles * 20 <= total * 21;
  if (!even || longest < kParts * kMinimalTiles) return;
  const int64_t waves = items / at_once;
  const int64_t last = items - waves * at_once;
  const int64_t whole = waves * at_once / shape.blocks_per_tile;
  const int64_t partial_items = (tiles - whole) * shape.blocks_per_tile * kParts;
  if (last == 0 || partial_items > kMostPartialItems) return;
  // The rest of the last wave ends within a split, so the estimate subtracts a whole split.
  const double gain =
      static_cast<double>(longest) *
      (1.0 - static_cast<double>(last) / static_cast<double>(at_once) - 1.0 / kParts);
  const double cost = kCombineCost + kPartCost * static_cast<double>(partial_items);
  if (gain < 1.5 * cost) return;
  for (int64_t i = whole; i < tiles; ++i) drafts[i].parts = kParts;
}

// Returns the key tiles at which the draft is split.
std::vector<int64_t> CutsOf(const Draft& draft) {
  const int64_t tiles = draft.key_tiles;
  std::vector<int64_t> cuts{0};
  if (draft.early && draft.late_tiles() > 0) cuts.push_back(draft.late_tiles());
  const int64_t step = (tiles + draft.parts - 1) / draft.parts;
  for (int64_t part = 1; part < draft.parts; ++part) cuts.push_back(std::min(part * step, tiles));
  cuts.push_back(tiles);
  return cuts;
}

// Appends the draft's tile, or its splits and their combination.
void AppendTiles(const Draft& draft, int32_t keys, ForwardPlan& plan,
                 std::vector<WeightedTile>& weighted) {
  WeightedTile entry;
  entry.tile.q_row_begin = draft.q_row_begin;
  entry.tile.q_rows = draft.q_rows;
  const std::vector<int64_t> cuts = CutsOf(draft);
  const int64_t parts = static_cast<int64_t>(cuts.size()) - 1;
  if (parts > 1) {
    CombineTile combine;
    combine.q_row_begin = draft.q_row_begin;
    combine.q_rows = draft.q_rows;
    combine.slot_begin = Narrow(plan.slots);
    combine.slot_end = Narrow(plan.slots + parts);
    plan.combines.push_back(combine);
  }
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t begin = cuts[part], end = cuts[part + 1];
    entry.tile.range_begin = Narrow(plan.ranges.size());
    if (parts == 1) {
      plan.ranges.insert(plan.ranges.end(), draft.ranges.begin(), draft.ranges.end());
    } else {
      AppendSlice(draft.ranges, keys, begin, end, plan.ranges);
      entry.tile.partial_slot = Narrow(plan.slots++);
    }
    entry.tile.range_end = Narrow(plan.ranges.size());
    entry.weight = end - begin;
    entry.early = draft.early && begin >= draft.late_tiles();
    weighted.push_back(entry);
  }
}

}  // namespace

ForwardPlan PlanForwardTiles(const ForwardCall& call, const ForwardTileShape& shape) {
  std::vector<Draft> drafts = DraftTiles(call, shape);
  FillBlocks(shape, drafts);
  if (!AnySplit(drafts)) MarkEarly(shape, drafts);
  const bool may_split = shape.fills_last_wave && !call.has_late_keys();
  if (may_split && !AnySplit(drafts)) ShortenLastWave(shape, drafts);
  ForwardPlan plan;
  std::vector<WeightedTile> weighted;
  for (const Draft& draft : drafts) AppendTiles(draft, shape.keys, plan, weighted);
  std::stable_sort(weighted.begin(), weighted.end(), [](const auto& a, const auto& b) {
    return a.early != b.early ? a.early : a.weight > b.weight;
  });
  plan.tiles.reserve(weighted.size());
  for (const WeightedTile& entry : weighted) plan.tiles.push_back(entry.tile);
  return plan;
}

BackwardPlan PlanBackwardTiles(const BackwardCall& call, int32_t tile_keys, int32_t q_align) {
  const AttentionProblem& problem = *call.problem;
  std::map<int64_t, std::vector<const Piece*>> queries_by_document;
  for (const Piece& piece : call.q_pieces) {
    if (piece.length > 0) queries_by_document[piece.document].push_back(&piece);
  }
  int32_t key_piece = -1;
  BackwardPlan plan;
  std::vector<std::pair<int64_t, BackwardTile>> weighted;
  for (const KvBlock& block : call.blocks) {
    for (const Piece& k : block.pieces) {
      ++key_piece;
      const auto found = queries_by_document.find(k.document);
      if (found == queries_by_document.end()) continue;
      const Band& band = problem.bands[k.document];
      const Band reversed{-band.upper, -band.lower};
      for (int64_t begin = 0; begin < k.length; begin += tile_keys) {
        const int64_t end = std::min<int64_t>(begin + tile_keys, k.length);
        BackwardTile tile;
        tile.k = block.k;
        tile.v = block.v;
        tile.dk = block.dk;
        tile.dv = block.dv;
        tile.block_rows = block.rows;
        tile.row_begin = k.local_begin + begin;
        tile.rows = Narrow(end - begin);
        tile.range_begin = Narrow(plan.ranges.size());
        tile.piece = key_piece;
        int64_t weight = 0;
        for (const Piece* q : found->second) {
          RowRange reach = ReachingQueries(*q, k, begin, end, band);
          if (reach.empty()) continue;
          reach.begin -= reach.begin % q_align;
          // The q rows that see every key: the same function with q and k swapped.
          const RowRange full = FullyVisibleKeys(k, begin, end, *q, reversed);
          QRange range;
          range.row_begin = q->local_begin + reach.begin;
          range.row_count = Narrow(reach.size());
          range.limits = LimitsOf(*q, reach.begin, k, begin, band);
          range.piece = Narrow(q - call.q_pieces.data());
          // A short key tile is always masked: its missing columns are not zero
          // after exp.
          if (!full.empty() && end - begin == tile_keys) {
            range.full_begin = Narrow(std::max<int64_t>(full.begin - reach.begin, 0));
            range.full_end = Narrow(std::min(full.end, reach.end) - reach.begin);
          }
          weight += range.row_count;
          plan.ranges.push_back(range);
        }
        tile.range_end = Narrow(plan.ranges.size());
        if (tile.range_end > tile.range_begin) weighted.emplace_back(weight, tile);
      }
    }
  }
  std::stable_sort(weighted.begin(), weighted.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  plan.tiles.reserve(weighted.size());
  for (const auto& entry : weighted) plan.tiles.push_back(entry.second);
  return plan;
}

QRange RowsOf(const QRange& range, int32_t first, int32_t count) {
  QRange part = range;
  part.row_begin += first;
  part.row_count = count;
  part.full_begin = std::clamp(range.full_begin - first, 0, count);
  part.full_end = std::clamp(range.full_end - first, 0, count);
  BandLimits& limits = part.limits;
  limits.lower_base += limits.q_stride * first;
  limits.upper_base += limits.q_stride * first;
  limits.first_lower = Clamp30(-FloorDivide(-limits.lower_base, limits.k_stride));
  limits.first_upper = Clamp30(FloorDivide(limits.upper_base, limits.k_stride));
  return part;
}

}  // namespace ringattn::worker::cuda
