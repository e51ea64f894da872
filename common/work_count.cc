#include "common/work_count.h"

#include <algorithm>

namespace ringattn {
namespace {

int64_t CeilDivide(int64_t dividend, int64_t divisor) {
  return dividend / divisor + (dividend % divisor > 0 ? 1 : 0);
}

// Sum over i in [0, count) of floor((first + step * i) / divisor), first >= 0 and
// step >= 0, by exchanging the roles of the axes as Euclid's algorithm does.
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

// Sum over the rows of q of the number of keys at positions <= the row's + bound.
int64_t KeysUpTo(const Piece& q, const Piece& kv, int64_t bound) {
  // Row r counts clamp(floor((first + q.stride r) / kv.stride) + 1, 0, kv.length).
  const int64_t first = q.position + bound - kv.position;
  const int64_t some = std::clamp<int64_t>(CeilDivide(-first, q.stride), 0, q.length);
  const int64_t all = std::clamp<int64_t>(
      CeilDivide((kv.length - 1) * kv.stride - first, q.stride), some, q.length);
  const int64_t growing = all - some;
  if (growing == 0) return kv.length * (q.length - all);
  return FloorSum(growing, kv.stride, q.stride, first + q.stride * some) + growing +
         kv.length * (q.length - all);
}

// REQUIRES: a band that is not empty.
int64_t CountPairs(const Piece& q, const Piece& kv, const Band& band) {
  return KeysUpTo(q, kv, band.upper) - KeysUpTo(q, kv, band.lower - 1);
}

// Whether no row of q, or every row of q, sees the keys of kv. Without a division:
// most pairs of pieces are one or the other.
bool SeesNone(const Piece& q, const Piece& kv, const Band& band) {
  return kv.position > q.PositionOf(q.length - 1) + band.upper ||
         kv.PositionOf(kv.length - 1) < q.position + band.lower || band.lower > band.upper;
}
bool SeesAll(const Piece& q, const Piece& kv, const Band& band) {
  return kv.position >= q.PositionOf(q.length - 1) + band.lower &&
         kv.PositionOf(kv.length - 1) <= q.position + band.upper;
}

int64_t TilesOf(const RowRange& keys) {
  return keys.empty() ? 0 : (keys.end - 1) / kTileRows - keys.begin / kTileRows + 1;
}

// Tiles of the first `count` whole tiles of q. REQUIRES: the rows of a tile together
// reach every position between the first and the last that one of them reaches, and
// those are at least kv.stride, so that tile t has work with the keys
//   from ceil((first + step t) / stride) to floor((last + step t) / stride).
int64_t CountWholeTiles(const Piece& q, const Piece& kv, const Band& band, int64_t count) {
  const int64_t step = kTileRows * q.stride;
  const int64_t first = q.position + band.lower - kv.position;
  const int64_t last = q.PositionOf(kTileRows - 1) + band.upper - kv.position;
  const int64_t end = (kv.length - 1) * kv.stride;  // of the last key, from the first
  const auto tile_at = [&](int64_t distance, int64_t low) {
    return std::clamp(CeilDivide(distance, step), low, count);
  };
  // Tiles with work; from `sliding_begin` on their first key is not key 0, from
  // `sliding_end` on their last key is the last one of all.
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

// Calls visit(q piece, kv piece, document) for every two pieces of one document.
template <typename Visit>
void ForEachPairInOneDocument(const std::vector<Piece>& q, const std::vector<Piece>& kv,
                              const Visit& visit) {
  const auto before = [](const Piece& piece, int64_t document) {
    return piece.document < document;
  };
  auto q_begin = q.begin();
  auto kv_begin = kv.begin();
  while (q_begin != q.end() && kv_begin != kv.end()) {
    if (q_begin->document < kv_begin->document) {
      q_begin = std::lower_bound(q_begin, q.end(), kv_begin->document, before);
      continue;
    }
    if (kv_begin->document < q_begin->document) {
      kv_begin = std::lower_bound(kv_begin, kv.end(), q_begin->document, before);
      continue;
    }
    const int64_t document = q_begin->document;
    auto kv_end = kv_begin;
    while (kv_end != kv.end() && kv_end->document == document) ++kv_end;
    for (; q_begin != q.end() && q_begin->document == document; ++q_begin) {
      for (auto piece = kv_begin; piece != kv_end; ++piece) visit(*q_begin, *piece, document);
    }
    kv_begin = kv_end;
  }
}

}  // namespace

std::vector<Piece> SortedByDocument(std::vector<Piece> pieces) {
  std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
    return a.document < b.document;
  });
  return pieces;
}

WorkCount CountWork(const std::vector<Piece>& q, const std::vector<Piece>& kv,
                    const std::vector<Band>& bands) {
  WorkCount count;
  ForEachPairInOneDocument(q, kv, [&](const Piece& a, const Piece& b, int64_t document) {
    const Band& band = bands[document];
    if (SeesNone(a, b, band)) return;
    if (SeesAll(a, b, band)) {
      count.pairs += a.length * b.length;
      count.tiles += CeilDivide(a.length, kTileRows) * CeilDivide(b.length, kTileRows);
      return;
    }
    count.pairs += CountPairs(a, b, band);
    count.tiles += CountTiles(a, b, band);
  });
  return count;
}

RowRange NeededRows(const std::vector<Piece>& q, const std::vector<Piece>& kv,
                    const std::vector<Band>& bands) {
  RowRange hull;
  ForEachPairInOneDocument(q, kv, [&](const Piece& a, const Piece& b, int64_t document) {
    const bool is_inside =
        hull.begin <= b.local_begin && b.local_begin + b.length <= hull.end;
    if (is_inside || SeesNone(a, b, bands[document])) return;
    const RowRange keys = ReachableKeys(a, 0, a.length, b, bands[document]);
    if (keys.empty()) return;
    const RowRange rows{b.local_begin + keys.begin, b.local_begin + keys.end};
    hull = hull.empty() ? rows
                        : RowRange{std::min(hull.begin, rows.begin), std::max(hull.end, rows.end)};
  });
  return hull;
}

}  // namespace ringattn
