#include "common/schedule/route/work_count.h"

#include <algorithm>
#include <utility>

namespace ringattn {
namespace {

int64_t CeilDivide(int64_t dividend, int64_t divisor) {
  return dividend / divisor + (dividend % divisor > 0 ? 1 : 0);
}

// Returns the sum over i in [0, count) of floor((first + step * i) / divisor), with first >= 0 and
// step >= 0. Exchanges the roles of the axes as Euclid's algorithm does.
int64_t FloorSum(int64_t count, int64_t divisor, int64_t step, int64_t first) {
  int64_t sum = 0;
  while (count > 0) {
    sum += count * (count - 1) / 2 * (step / divisor) + count * (first / divisor);
    step %= divisor;
    first %= divisor;
    const int64_t top = step * count + first;
    if (top < divisor) break;
    count = top / divisor;
    first = top % divisor;
    std::swap(step, divisor);
  }
  return sum;
}

// Returns the sum over the rows of q of the keys at positions <= the row's + bound.
int64_t KeysUpTo(const Piece& q, const Piece& kv, int64_t bound) {
  // Row r counts clamp(floor((first + q.stride r) / kv.stride) + 1, 0, kv.length).
  const int64_t first = q.position + bound - kv.position;
  const int64_t some = std::clamp<int64_t>(CeilDivide(-first, q.stride), 0, q.length);
  const int64_t all = std::clamp<int64_t>(CeilDivide((kv.length - 1) * kv.stride - first, q.stride),
                                          some, q.length);
  const int64_t growing = all - some;
  if (growing == 0) return kv.length * (q.length - all);
  return FloorSum(growing, kv.stride, q.stride, first + q.stride * some) + growing +
         kv.length * (q.length - all);
}

// REQUIRES: the band is not empty.
int64_t CountPairs(const Piece& q, const Piece& kv, const Band& band) {
  return KeysUpTo(q, kv, band.upper) - KeysUpTo(q, kv, band.lower - 1);
}

int64_t TilesOf(const RowRange& keys) {
  return keys.empty() ? 0 : (keys.end - 1) / kTileRows - keys.begin / kTileRows + 1;
}

// Returns the tiles of the first `count` whole tiles of q. REQUIRES: the rows of a tile together
// reach every position between the first and the last that one of them reaches, and these positions
// span at least kv.stride, so that tile t has work with the keys
//   from ceil((first + step t) / stride) to floor((last + step t) / stride).
int64_t CountWholeTiles(const Piece& q, const Piece& kv, const Band& band, int64_t count) {
  const int64_t step = kTileRows * q.stride;
  const int64_t first = q.position + band.lower - kv.position;
  const int64_t last = q.PositionOf(kTileRows - 1) + band.upper - kv.position;
  const int64_t end = (kv.length - 1) * kv.stride;  // of the last key, relative to the first
  const auto tile_at = [&](int64_t distance, int64_t low) {
    return std::clamp(CeilDivide(distance, step), low, count);
  };
  // Tiles with work. From `sliding_begin` on their first key is not key 0; from `sliding_end` on
  // their last key is the last of all.
  const int64_t begin = tile_at(-last, 0);
  const int64_t stop = tile_at(end - first + 1, begin);
  const int64_t sliding_begin = std::min(stop, tile_at(-first, begin));
  const int64_t sliding_end = std::min(stop, tile_at(end - last, begin));
  int64_t tiles = stop - begin;
  tiles += (stop - sliding_end) * ((kv.length - 1) / kTileRows);
  tiles += FloorSum(sliding_end - begin, kTileRows * kv.stride, step, last + step * begin);
  tiles -= FloorSum(stop - sliding_begin, kTileRows * kv.stride, step,
                    first + kv.stride - 1 + step * sliding_begin);
  return tiles;
}

int64_t CountTiles(const Piece& q, const Piece& kv, const Band& band) {
  const int64_t width = band.upper - band.lower + 1;
  int64_t tiles = 0;
  int64_t row = 0;
  if (width >= q.stride && kv.stride <= width + (kTileRows - 1) * q.stride) {
    tiles = CountWholeTiles(q, kv, band, q.length / kTileRows);
    row = q.length / kTileRows * kTileRows;
  }
  for (; row < q.length; row += kTileRows) {
    tiles += TilesOf(ReachableKeys(q, row, std::min(row + kTileRows, q.length), kv, band));
  }
  return tiles;
}

int64_t FirstOf(const Piece& piece) { return piece.position; }
int64_t LastOf(const Piece& piece) { return piece.PositionOf(piece.length - 1); }

using PieceRange = std::pair<const Piece*, const Piece*>;

// Calls visit(q pieces, kv pieces, document) for every document that has both.
template <typename Visit>
void ForEachCommonDocument(const std::vector<Piece>& q, const std::vector<Piece>& kv,
                           const Visit& visit) {
  const auto end_of = [](const Piece* begin, const Piece* end) {
    return std::find_if(begin, end,
                        [begin](const Piece& p) { return p.document != begin->document; });
  };
  const auto first_of = [](const Piece* begin, const Piece* end, int64_t document) {
    return std::lower_bound(begin, end, document, [](const Piece& piece, int64_t wanted) {
      return piece.document < wanted;
    });
  };
  const Piece* q_begin = q.data();
  const Piece* const q_all = q_begin + q.size();
  const Piece* kv_begin = kv.data();
  const Piece* const kv_all = kv_begin + kv.size();
  while (q_begin != q_all && kv_begin != kv_all) {
    if (q_begin->document < kv_begin->document) {
      q_begin = first_of(q_begin, q_all, kv_begin->document);
    } else if (kv_begin->document < q_begin->document) {
      kv_begin = first_of(kv_begin, kv_all, q_begin->document);
    } else {
      const Piece* const q_end = end_of(q_begin, q_all);
      const Piece* const kv_end = end_of(kv_begin, kv_all);
      visit(PieceRange{q_begin, q_end}, PieceRange{kv_begin, kv_end}, q_begin->document);
      q_begin = q_end;
      kv_begin = kv_end;
    }
  }
}

// The keys that a piece of q sees. None of its rows sees a key outside [begin, stop). All rows see
// [all_begin, all_stop), if that range is not empty.
struct VisibleKeys {
  explicit VisibleKeys(const Piece* first)
      : begin(first), stop(first), all_begin(first), all_stop(first) {}

  // Advances to the next piece of q. Both sides ascend, so the pointers only move forward and a
  // walk over a document is linear in its pieces.
  void AdvanceTo(const Piece& q, const Piece* end, const Band& band) {
    while (begin != end && LastOf(*begin) < FirstOf(q) + band.lower) ++begin;
    while (stop != end && FirstOf(*stop) <= LastOf(q) + band.upper) ++stop;
    while (all_begin != end && FirstOf(*all_begin) < LastOf(q) + band.lower) ++all_begin;
    while (all_stop != end && LastOf(*all_stop) <= FirstOf(q) + band.upper) ++all_stop;
  }

  const Piece* begin;
  const Piece* stop;
  const Piece* all_begin;
  const Piece* all_stop;
};

// Counts document by document. Reuses its memory.
class Counter {
 public:
  void Add(const PieceRange& q, const PieceRange& kv, const Band& band) {
    SumUp(kv);
    VisibleKeys keys(kv.first);
    for (const Piece* rows = q.first; rows != q.second; ++rows) {
      keys.AdvanceTo(*rows, kv.second, band);
      if (keys.all_begin >= keys.all_stop) {
        AddPartly(*rows, keys.begin, keys.stop, band);
        continue;
      }
      AddPartly(*rows, keys.begin, keys.all_begin, band);
      AddPartly(*rows, keys.all_stop, keys.stop, band);
      const int64_t first = keys.all_begin - kv.first;
      const int64_t last = keys.all_stop - kv.first;
      count_.pairs += rows->length * (rows_before_[last] - rows_before_[first]);
      count_.tiles +=
          CeilDivide(rows->length, kTileRows) * (tiles_before_[last] - tiles_before_[first]);
    }
  }

  const WorkCount& count() const { return count_; }

 private:
  void SumUp(const PieceRange& kv) {
    rows_before_.assign(1, 0);
    tiles_before_.assign(1, 0);
    for (const Piece* piece = kv.first; piece != kv.second; ++piece) {
      rows_before_.push_back(rows_before_.back() + piece->length);
      tiles_before_.push_back(tiles_before_.back() + CeilDivide(piece->length, kTileRows));
    }
  }

  void AddPartly(const Piece& q, const Piece* begin, const Piece* end, const Band& band) {
    for (const Piece* kv = begin; kv < end; ++kv) {
      count_.pairs += CountPairs(q, *kv, band);
      count_.tiles += CountTiles(q, *kv, band);
    }
  }

  WorkCount count_;
  std::vector<int64_t> rows_before_;  // by key piece of the document
  std::vector<int64_t> tiles_before_;
};

// Returns whether no row of q sees a key of kv, or every row sees all of them. Both by positions,
// so neither may hold.
bool SeesNone(const Piece& q, const Piece& kv, const Band& band) {
  return LastOf(kv) < FirstOf(q) + band.lower || FirstOf(kv) > LastOf(q) + band.upper;
}
bool SeesAll(const Piece& q, const Piece& kv, const Band& band) {
  return FirstOf(kv) >= LastOf(q) + band.lower && LastOf(kv) <= FirstOf(q) + band.upper;
}

// Most shards are a few pieces of one document. The walks over many pieces would then take longer
// than the counts.
constexpr size_t kFewPieces = 4;
bool AreFew(const std::vector<Piece>& q, const std::vector<Piece>& kv) {
  return q.size() * kv.size() <= kFewPieces;
}

WorkCount CountFew(const std::vector<Piece>& q, const std::vector<Piece>& kv,
                   const std::vector<Band>& bands) {
  WorkCount count;
  for (const Piece& rows : q) {
    const Band& band = bands[rows.document];
    for (const Piece& keys : kv) {
      if (rows.document != keys.document || band.lower > band.upper) continue;
      if (SeesNone(rows, keys, band)) continue;
      if (SeesAll(rows, keys, band)) {
        count.pairs += rows.length * keys.length;
        count.tiles += CeilDivide(rows.length, kTileRows) * CeilDivide(keys.length, kTileRows);
      } else {
        count.pairs += CountPairs(rows, keys, band);
        count.tiles += CountTiles(rows, keys, band);
      }
    }
  }
  return count;
}

RowRange NeededOfFew(const std::vector<Piece>& q, const std::vector<Piece>& kv,
                     const std::vector<Band>& bands) {
  RowRange needed;
  const RowRange all =
      kv.empty() ? RowRange{}
                 : RowRange{kv.front().local_begin, kv.back().local_begin + kv.back().length};
  // Later queries mostly see more keys.
  for (size_t i = q.size(); i-- > 0;) {
    const Piece& rows = q[i];
    const Band& band = bands[rows.document];
    for (const Piece& keys : kv) {
      if (rows.document != keys.document || band.lower > band.upper) continue;
      if (SeesNone(rows, keys, band)) continue;
      RowRange seen{0, keys.length};
      if (!SeesAll(rows, keys, band)) seen = ReachableKeys(rows, 0, rows.length, keys, band);
      if (seen.empty()) continue;
      seen = {keys.local_begin + seen.begin, keys.local_begin + seen.end};
      needed = needed.empty()
                   ? seen
                   : RowRange{std::min(needed.begin, seen.begin), std::max(needed.end, seen.end)};
    }
    if (!all.empty() && needed.begin == all.begin && needed.end == all.end) break;
  }
  return needed;
}

// Returns the first key, in the order of the pieces, that a row of q sees, as a local row of the
// buffer that kv describes; -1 if there is none. The smallest key that a row sees grows with the
// row, so the first row that sees any key sees it.
int64_t FirstSeen(const std::vector<Piece>& q, const std::vector<Piece>& kv,
                  const std::vector<Band>& bands) {
  auto keys = kv.begin();
  for (auto rows = q.begin(); rows != q.end() && keys != kv.end();) {
    const auto before = [](const Piece& piece, int64_t document) {
      return piece.document < document;
    };
    if (rows->document < keys->document) {
      rows = std::lower_bound(rows, q.end(), keys->document, before);
      continue;
    }
    keys = keys->document < rows->document
               ? std::lower_bound(keys, kv.end(), rows->document, before)
               : keys;
    const Band& band = bands[rows->document];
    const auto is_candidate = [&](auto piece) {
      return piece != kv.end() && piece->document == rows->document;
    };
    while (is_candidate(keys) && LastOf(*keys) < FirstOf(*rows) + band.lower) ++keys;
    for (auto piece = keys; is_candidate(piece) && FirstOf(*piece) <= LastOf(*rows) + band.upper;
         ++piece) {
      const RowRange seen = ReachableKeys(*rows, 0, rows->length, *piece, band);
      if (!seen.empty()) return piece->local_begin + seen.begin;
    }
    ++rows;
  }
  return -1;
}

// Returns the last key plus 1: the same search with all orders reversed.
int64_t EndSeen(const std::vector<Piece>& q, const std::vector<Piece>& kv,
                const std::vector<Band>& bands) {
  auto keys = kv.rbegin();
  for (auto rows = q.rbegin(); rows != q.rend() && keys != kv.rend();) {
    const auto behind = [](const Piece& piece, int64_t document) {
      return piece.document > document;
    };
    if (rows->document > keys->document) {
      rows = std::lower_bound(rows, q.rend(), keys->document, behind);
      continue;
    }
    keys = keys->document > rows->document
               ? std::lower_bound(keys, kv.rend(), rows->document, behind)
               : keys;
    const Band& band = bands[rows->document];
    const auto is_candidate = [&](auto piece) {
      return piece != kv.rend() && piece->document == rows->document;
    };
    while (is_candidate(keys) && FirstOf(*keys) > LastOf(*rows) + band.upper) ++keys;
    for (auto piece = keys; is_candidate(piece) && LastOf(*piece) >= FirstOf(*rows) + band.lower;
         ++piece) {
      const RowRange seen = ReachableKeys(*rows, 0, rows->length, *piece, band);
      if (!seen.empty()) return piece->local_begin + seen.end;
    }
    ++rows;
  }
  return -1;
}

}  // namespace

WorkCount CountWork(const std::vector<Piece>& q, const std::vector<Piece>& kv,
                    const std::vector<Band>& bands) {
  if (AreFew(q, kv)) return CountFew(q, kv, bands);
  Counter counter;
  ForEachCommonDocument(q, kv, [&](const PieceRange& a, const PieceRange& b, int64_t document) {
    const Band& band = bands[document];
    if (band.lower <= band.upper) counter.Add(a, b, band);
  });
  return counter.count();
}

RowRange NeededRows(const std::vector<Piece>& q, const std::vector<Piece>& kv,
                    const std::vector<Band>& bands) {
  if (AreFew(q, kv)) return NeededOfFew(q, kv, bands);
  const int64_t begin = FirstSeen(q, kv, bands);
  return begin < 0 ? RowRange{} : RowRange{begin, EndSeen(q, kv, bands)};
}

}  // namespace ringattn
