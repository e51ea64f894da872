#include "common/schedule/kv_route.h"

#include <algorithm>
#include <utility>

namespace ringattn {
namespace {

using Ranges = std::vector<RowRange>;
// By distance, then source, then part.
using RangesByDistance = std::vector<std::vector<Ranges>>;

RowRange Hull(const RowRange& a, const RowRange& b) {
  if (a.empty()) return b;
  if (b.empty()) return a;
  return {std::min(a.begin, b.begin), std::max(a.end, b.end)};
}

int64_t RowsIn(const Ranges& ranges) {
  int64_t rows = 0;
  for (const RowRange& range : ranges) rows += range.size();
  return rows;
}

int PipelineParts(const ShardPlan& plan) {
  int64_t most_rows = 0;
  for (const Shard& shard : plan.kv) most_rows = std::max(most_rows, RowsIn(shard));
  return static_cast<int>(std::clamp<int64_t>(most_rows / kMinPartRows, 1, kMaxParts));
}

// Divides a shard into `parts` ranges: between two spans if possible, else after a whole number of
// tiles.
Ranges CutForPipeline(const Shard& shard, int parts) {
  const int64_t rows = RowsIn(shard);
  Ranges ranges;
  int64_t begin = 0;
  for (int part = 1; part <= parts; ++part) {
    int64_t cut = rows * part / parts;
    if (part < parts) {
      const int64_t target = cut;
      cut = target / kTileRows * kTileRows;
      int64_t boundary = 0;
      for (const Span& span : shard) {
        boundary += span.length;
        if (std::abs(boundary - target) < kTileRows / 2) cut = boundary;
      }
    }
    cut = std::max(cut, begin);
    ranges.push_back(begin < cut ? RowRange{begin, cut} : RowRange{});
    begin = cut;
  }
  return ranges;
}

Ranges CutIntoSlices(const Shard& shard, Layout layout) {
  const int64_t rows = RowsIn(shard);
  if (layout != Layout::kZigzag || shard.size() < 2) return {{0, rows}};
  return {{0, shard[0].length}, {shard[0].length, rows}};
}

// Distances are numbered outer * group_size + inner.
int NumberOf(int outer, int inner, int group_size) { return outer * group_size + inner; }

// needed[d][source][part]: the rows of the part that the rank at distance d sees.
RangesByDistance FindNeeds(const RingSpans& pieces, const std::vector<Ranges>& parts,
                           int group_size) {
  const int world_size = static_cast<int>(parts.size());
  RangesByDistance needed(world_size, std::vector<Ranges>(world_size));
  for (int source = 0; source < world_size; ++source) {
    for (const RowRange& part : parts[source]) {
      const Ranges by_rank = pieces.Needs(source, part);
      for (int rank = 0; rank < world_size; ++rank) {
        const int outer =
            (rank / group_size + world_size - source / group_size) % (world_size / group_size);
        const int inner = (rank % group_size + group_size - source % group_size) % group_size;
        needed[NumberOf(outer, inner, group_size)][source].push_back(by_rank[rank]);
      }
    }
  }
  return needed;
}

// Returns the rows that a rank must hold to serve itself and all ranks to which its block goes on.
RangesByDistance RelayedRows(const RangesByDistance& needed, int group_size) {
  RangesByDistance held = needed;
  for (size_t distance = held.size() - 1; distance > 0; --distance) {
    const bool is_outer_hop = distance % group_size == 0;
    const size_t before = is_outer_hop ? distance - group_size : distance - 1;
    if (before == 0) continue;
    for (size_t source = 0; source < held.size(); ++source) {
      for (size_t part = 0; part < held[distance][source].size(); ++part) {
        RowRange& rows = held[before][source][part];
        rows = Hull(rows, held[distance][source][part]);
      }
    }
  }
  return held;
}

// Sums, over the steps, the rows that the busiest rank receives.
int64_t RowsOnCriticalPath(const RangesByDistance& held) {
  int64_t rows = 0;
  for (size_t distance = 1; distance < held.size(); ++distance) {
    int64_t most = 0;
    for (const Ranges& ranges : held[distance]) most = std::max(most, RowsIn(ranges));
    rows += most;
  }
  return rows;
}

Ranges JoinTouching(const Ranges& ranges) {
  Ranges joined;
  for (const RowRange& range : ranges) {
    if (range.empty()) continue;
    if (!joined.empty() && joined.back().end == range.begin) {
      joined.back().end = range.end;
    } else {
      joined.push_back(range);
    }
  }
  return joined;
}

}  // namespace

bool KvRoute::SeesAny(int step, int source) const {
  const std::vector<char>& parts = sees[step][source];
  return std::find(parts.begin(), parts.end(), 1) != parts.end();
}

RingSpans::RingSpans(const AttentionSpec& spec, const ShardPlan& plan, CancelLatch* latch)
    : latch_(latch), bands_(DocumentBands(spec)), q_(plan.world_size), kv_(plan.world_size) {
  for (int rank = 0; rank < plan.world_size && !latch_->Poll(); ++rank) {
    q_[rank] = QueryPieces(spec.shape, plan.q[rank]);
    kv_[rank] = KeyPieces(spec.shape, plan.kv[rank]);
  }
}

WorkCount RingSpans::Work(int rank, int source, const RowRange& kv_rows) const {
  if (latch_->Poll()) return {};
  return CountWork(q_[rank], SlicePieces(kv_[source], kv_rows.begin, kv_rows.end), bands_);
}

std::vector<RowRange> RingSpans::Needs(int source, const RowRange& part) const {
  std::vector<RowRange> needs(q_.size());
  const std::vector<Piece> kv = SlicePieces(kv_[source], part.begin, part.end);
  for (size_t rank = 0; rank < q_.size() && !latch_->Poll(); ++rank) {
    const RowRange rows = NeededRows(q_[rank], kv, bands_);
    if (!rows.empty()) needs[rank] = {part.begin + rows.begin, part.begin + rows.end};
  }
  return needs;
}

KvRoute MakeKvRoute(const ShardPlan& plan, const RingSpans& pieces, PartRule rule, int group_size) {
  KvRoute route;
  route.world_size = plan.world_size;
  for (const Shard& shard : plan.q) route.q_rows.push_back(RowsIn(shard));
  for (const Shard& shard : plan.kv) route.kv_rows.push_back(RowsIn(shard));
  std::vector<Ranges> parts;
  if (rule == PartRule::kPipeline) route.parts = PipelineParts(plan);
  for (const Shard& shard : plan.kv) {
    parts.push_back(rule == PartRule::kPipeline ? CutForPipeline(shard, route.parts)
                                                : CutIntoSlices(shard, plan.layout));
  }

  RangesByDistance needed = FindNeeds(pieces, parts, group_size);
  RangesByDistance held = RelayedRows(needed, group_size);
  // Direct exchange never moves more rows. But a rank's own block must then outlive the pass, which
  // takes a third K/V buffer, and each rank communicates with all others instead of two neighbours.
  // So direct exchange must save a quarter of the exchange time.
  route.direct = 4 * RowsOnCriticalPath(needed) < 3 * RowsOnCriticalPath(held);
  if (route.direct && group_size < plan.world_size) {
    group_size = plan.world_size;
    needed = FindNeeds(pieces, parts, group_size);
  }
  if (route.direct) held = needed;
  route.group_size = group_size;

  const auto any_rows = [&](int outer, int inner) {
    const std::vector<Ranges>& by_source = held[NumberOf(outer, inner, group_size)];
    return std::any_of(by_source.begin(), by_source.end(),
                       [](const Ranges& ranges) { return RowsIn(ranges) > 0; });
  };
  route.visits = OrderVisits(
      plan.world_size / group_size, group_size,
      rule == PartRule::kPipeline ? VisitOrder::kCollectorsLast : VisitOrder::kByRound, any_rows);
  for (const RingVisit& visit : route.visits) {
    const int distance = NumberOf(visit.outer, visit.inner, group_size);
    std::vector<Ranges>& by_source = route.held.emplace_back();
    std::vector<std::vector<char>>& sees = route.sees.emplace_back();
    for (int source = 0; source < plan.world_size; ++source) {
      std::vector<char>& parts_seen = sees.emplace_back();
      for (const RowRange& rows : needed[distance][source]) parts_seen.push_back(!rows.empty());
      Ranges ranges = held[distance][source];
      if (distance == 0) ranges = {{0, route.kv_rows[source]}};
      if (rule == PartRule::kSlices || distance == 0) ranges = JoinTouching(ranges);
      by_source.push_back(std::move(ranges));
    }
  }
  return route;
}

std::vector<std::vector<std::vector<RowRange>>> SeenRows(const ShardPlan& plan,
                                                         const RingSpans& pieces) {
  std::vector<std::vector<Ranges>> seen(plan.world_size, std::vector<Ranges>(plan.world_size));
  for (int source = 0; source < plan.world_size; ++source) {
    for (const RowRange& slice : CutIntoSlices(plan.kv[source], plan.layout)) {
      const Ranges by_rank = pieces.Needs(source, slice);
      for (int rank = 0; rank < plan.world_size; ++rank) {
        seen[rank][source].push_back(by_rank[rank]);
      }
    }
  }
  for (std::vector<Ranges>& by_source : seen) {
    for (Ranges& ranges : by_source) ranges = JoinTouching(ranges);
  }
  return seen;
}

}  // namespace ringattn
