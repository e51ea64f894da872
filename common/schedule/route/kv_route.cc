#include "common/schedule/route/kv_route.h"

#include <algorithm>
#include <numeric>
#include <unordered_map>
#include <utility>

namespace ringattn {
namespace {

using Ranges = std::vector<RowRange>;

// Ranges by source, distance and part. Distances are numbered outer * group_size + inner. The
// ranges of a source are neighbours in memory.
class RangesByDistance {
 public:
  RangesByDistance(int world_size, int parts)
      : world_size_(world_size),
        parts_(parts),
        ranges_(static_cast<size_t>(world_size) * world_size * parts) {}

  int world_size() const { return world_size_; }
  int parts() const { return parts_; }
  RowRange* Of(int distance, int source) {
    return &ranges_[(static_cast<size_t>(source) * world_size_ + distance) * parts_];
  }
  const RowRange* Of(int distance, int source) const {
    return &ranges_[(static_cast<size_t>(source) * world_size_ + distance) * parts_];
  }

 private:
  int world_size_;
  int parts_;
  std::vector<RowRange> ranges_;
};

RowRange Hull(const RowRange& a, const RowRange& b) {
  if (a.empty()) return b;
  if (b.empty()) return a;
  return {std::min(a.begin, b.begin), std::max(a.end, b.end)};
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

int NumberOf(int outer, int inner, int group_size) { return outer * group_size + inner; }

// Returns the rows of each part that the rank at each distance sees.
RangesByDistance FindNeeds(const RingSpans& pieces, const std::vector<Ranges>& parts,
                           int group_size) {
  const int world_size = static_cast<int>(parts.size());
  size_t most_parts = 1;
  for (const Ranges& of_source : parts) most_parts = std::max(most_parts, of_source.size());
  RangesByDistance needed(world_size, static_cast<int>(most_parts));
  Ranges by_rank;
  const int groups = world_size / group_size;
  // Visits the ranks by their distance from the source.
  const auto for_each_distance = [&](int source, const auto& visit) {
    int distance = 0;
    for (int outer = 0; outer < groups; ++outer) {
      const int first = (source / group_size + outer) % groups * group_size;
      int slot = source % group_size;
      for (int inner = 0; inner < group_size; ++inner) {
        visit(distance++, first + slot);
        slot = slot + 1 == group_size ? 0 : slot + 1;
      }
    }
  };
  for (int source = 0; source < world_size; ++source) {
    for (size_t part = 0; part < parts[source].size(); ++part) {
      pieces.FindNeeds(source, parts[source][part], by_rank);
      for_each_distance(source, [&](int distance, int rank) {
        needed.Of(distance, source)[part] = by_rank[rank];
      });
    }
  }
  return needed;
}

// Returns the rows that a rank must hold to serve itself and all ranks to which its block goes on.
RangesByDistance RelayedRows(const RangesByDistance& needed, int group_size) {
  RangesByDistance held = needed;
  for (int source = 0; source < held.world_size(); ++source) {
    for (int distance = held.world_size() - 1; distance > 0; --distance) {
      const bool is_outer_hop = distance % group_size == 0;
      const int before = is_outer_hop ? distance - group_size : distance - 1;
      if (before == 0) continue;
      const RowRange* later = held.Of(distance, source);
      RowRange* rows = held.Of(before, source);
      for (int part = 0; part < held.parts(); ++part) rows[part] = Hull(rows[part], later[part]);
    }
  }
  return held;
}

// Returns by distance the rows that the busiest rank receives.
std::vector<int64_t> MostRows(const RangesByDistance& held) {
  std::vector<int64_t> most(held.world_size(), 0);
  for (int source = 0; source < held.world_size(); ++source) {
    const RowRange* range = held.Of(0, source);
    for (int64_t& rows : most) {
      int64_t of_source = 0;
      for (int part = 0; part < held.parts(); ++part) of_source += (range++)->size();
      rows = std::max(rows, of_source);
    }
  }
  return most;
}

// Returns the sum over the steps of MostRows.
int64_t RowsOnCriticalPath(const std::vector<int64_t>& most_rows) {
  return std::accumulate(most_rows.begin() + 1, most_rows.end(), int64_t{0});
}

bool SameRanges(const RowRange* a, const RowRange* b, int parts) {
  return std::equal(a, a + parts, b, [](const RowRange& x, const RowRange& y) {
    return x.begin == y.begin && x.end == y.end;
  });
}

// Sets HeldBlock::ranges.
void SetRanges(const RowRange* held, int parts, bool joins, Ranges& ranges) {
  ranges.clear();
  for (int part = 0; part < parts; ++part) {
    if (!joins) {
      ranges.push_back(held[part]);
    } else if (!held[part].empty()) {
      const bool touches = !ranges.empty() && ranges.back().end == held[part].begin;
      if (touches) {
        ranges.back().end = held[part].end;
      } else {
        ranges.push_back(held[part]);
      }
    }
  }
}

Ranges JoinTouching(const Ranges& ranges) {
  Ranges joined;
  SetRanges(ranges.data(), static_cast<int>(ranges.size()), /*joins=*/true, joined);
  return joined;
}

// Collects the blocks of a route.
class BlockTable {
 public:
  explicit BlockTable(KvRoute& route) : route_(route) {}

  // Returns the block's number.
  int32_t NumberOf(const HeldBlock& block) {
    std::vector<int32_t>& equal_hashes = by_hash_[HashOf(block)];
    for (int32_t id : equal_hashes) {
      if (Equal(route_.blocks[id], block)) return id;
    }
    equal_hashes.push_back(static_cast<int32_t>(route_.blocks.size()));
    route_.blocks.push_back(block);
    return equal_hashes.back();
  }

 private:
  static bool Equal(const HeldBlock& a, const HeldBlock& b) {
    return a.sees == b.sees && a.travels == b.travels &&
           std::equal(a.ranges.begin(), a.ranges.end(), b.ranges.begin(), b.ranges.end(),
                      [](const RowRange& x, const RowRange& y) {
                        return x.begin == y.begin && x.end == y.end;
                      });
  }
  static size_t HashOf(const HeldBlock& block) {
    size_t hash = block.sees * size_t{31} + block.travels;
    for (const RowRange& rows : block.ranges) {
      for (int64_t value : {rows.begin, rows.end}) {
        hash = (hash ^ static_cast<size_t>(value)) * size_t{0x9E3779B97F4A7C15};
        hash ^= hash >> 32;
      }
    }
    return hash;
  }

  KvRoute& route_;
  std::unordered_map<size_t, std::vector<int32_t>> by_hash_;
};

// Sets the blocks of all visits.
void SetBlocks(const RangesByDistance& needed, const RangesByDistance& held, PartRule rule,
               KvRoute& route) {
  const int world_size = route.world_size;
  const int groups = world_size / route.group_size;
  BlockTable table(route);
  route.block_ids.resize(route.visits.size() * world_size);
  HeldBlock block;
  std::vector<uint32_t> seen_by_any(route.visits.size(), 0);
  // By round: the parts to whose gradients an earlier rank of the chain has contributed.
  std::vector<uint32_t> contributed;
  for (int source = 0; source < world_size; ++source) {
    contributed.assign(groups, 0);
    int32_t id = -1;
    const RowRange* last = nullptr;
    for (int step = 0; step < route.steps(); ++step) {
      const RingVisit& visit = route.visits[step];
      const int distance = NumberOf(visit.outer, visit.inner, route.group_size);
      const bool in_chain = rule == PartRule::kPipeline && !route.direct && distance > 0;
      uint32_t sees = 0;
      for (int part = 0; part < needed.parts(); ++part) {
        if (!needed.Of(distance, source)[part].empty()) sees |= uint32_t{1} << part;
      }
      seen_by_any[step] |= sees;
      const uint32_t travels = in_chain ? contributed[visit.outer] : 0;
      if (in_chain && !visit.is_outer_hop()) contributed[visit.outer] |= sees;
      // At the first step the block is the whole shard; then it mostly stays the same.
      const RowRange* rows = held.Of(distance, source);
      const bool repeats = last != nullptr && sees == block.sees && travels == block.travels &&
                           SameRanges(last, rows, held.parts());
      if (!repeats) {
        block.sees = sees;
        block.travels = travels;
        const RowRange all{0, route.kv_rows[source]};
        if (step == 0) {
          SetRanges(&all, 1, /*joins=*/true, block.ranges);
        } else {
          SetRanges(rows, held.parts(), rule == PartRule::kSlices, block.ranges);
          last = rows;
        }
        id = table.NumberOf(block);
      }
      route.block_ids[static_cast<size_t>(step) * world_size + source] = id;
    }
  }
  for (uint32_t sees : seen_by_any) {
    int part = route.parts - 1;
    while (part > 0 && (sees >> part & 1) == 0) --part;
    route.first_parts.push_back(part);
  }
}

}  // namespace

RingSpans::RingSpans(const AttentionSpec& spec, const ShardPlan& plan, CancelLatch* latch)
    : latch_(latch), bands_(DocumentBands(spec)), q_(plan.world_size), kv_(plan.world_size) {
  for (int rank = 0; rank < plan.world_size && !latch_->Poll(); ++rank) {
    q_[rank] = QueryPieces(spec.shape, plan.q[rank]);
    kv_[rank] = KeyPieces(spec.shape, plan.kv[rank]);
  }
}

std::vector<Piece> RingSpans::KeysOf(int source, const RowRange& kv_rows) const {
  return SlicePieces(kv_[source], kv_rows.begin, kv_rows.end);
}

WorkCount RingSpans::Work(int rank, const std::vector<Piece>& keys) const {
  return latch_->Poll() ? WorkCount() : CountWork(q_[rank], keys, bands_);
}

void RingSpans::FindNeeds(int source, const RowRange& part, std::vector<RowRange>& by_rank) const {
  by_rank.assign(q_.size(), {});
  const std::vector<Piece> kv = SlicePieces(kv_[source], part.begin, part.end);
  for (size_t rank = 0; rank < q_.size() && !latch_->Poll(); ++rank) {
    const RowRange rows = NeededRows(q_[rank], kv, bands_);
    if (!rows.empty()) by_rank[rank] = {part.begin + rows.begin, part.begin + rows.end};
  }
}

KvRoute MakeKvRoute(const ShardPlan& plan, const RingSpans& pieces, PartRule rule, int group_size) {
  KvRoute route;
  route.world_size = plan.world_size;
  for (const Shard& shard : plan.q) route.q_rows.push_back(RowsIn(shard));
  for (const Shard& shard : plan.kv) route.kv_rows.push_back(RowsIn(shard));
  std::vector<Ranges> parts;
  route.rule = rule;
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
  std::vector<int64_t> most_rows = MostRows(held);
  route.direct = 4 * RowsOnCriticalPath(MostRows(needed)) < 3 * RowsOnCriticalPath(most_rows);
  if (route.direct && group_size < plan.world_size) {
    group_size = plan.world_size;
    needed = FindNeeds(pieces, parts, group_size);
  }
  if (route.direct) {
    held = needed;
    most_rows = MostRows(held);
  }
  route.group_size = group_size;

  const auto any_rows = [&](int outer, int inner) {
    return most_rows[NumberOf(outer, inner, group_size)] > 0;
  };
  route.visits = OrderVisits(
      plan.world_size / group_size, group_size,
      rule == PartRule::kPipeline ? VisitOrder::kCollectorsLast : VisitOrder::kByRound, any_rows);
  route.chain_begins.assign(plan.world_size / group_size, RingVisit::kNone);
  for (int visit = route.steps() - 1; visit > 0; --visit) {
    if (route.visits[visit].inner > 0) route.chain_begins[route.visits[visit].outer] = visit;
  }
  SetBlocks(needed, held, rule, route);
  return route;
}

std::vector<std::vector<std::vector<RowRange>>> SeenRows(const ShardPlan& plan,
                                                         const RingSpans& pieces) {
  std::vector<std::vector<Ranges>> seen(plan.world_size, std::vector<Ranges>(plan.world_size));
  Ranges by_rank;
  for (int source = 0; source < plan.world_size; ++source) {
    for (const RowRange& slice : CutIntoSlices(plan.kv[source], plan.layout)) {
      pieces.FindNeeds(source, slice, by_rank);
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
