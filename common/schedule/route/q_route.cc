#include "common/schedule/route/q_route.h"

#include <algorithm>

namespace ringattn {
namespace {

// [distance][source]: whether the rank at this distance to the right holds the source's queries.
using Held = std::vector<std::vector<char>>;

// Returns the queries that a rank must hold to serve itself and all later ranks.
Held Relayed(const Held& needed) {
  Held held = needed;
  for (size_t distance = held.size() - 1; distance-- > 1;) {
    for (size_t source = 0; source < held.size(); ++source) {
      held[distance][source] |= held[distance + 1][source];
    }
  }
  return held;
}

// Sums, over the distances, the rows that the busiest rank receives.
int64_t RowsOnCriticalPath(const Held& held, const std::vector<int64_t>& q_rows) {
  int64_t rows = 0;
  for (size_t distance = 1; distance < held.size(); ++distance) {
    int64_t most = 0;
    for (size_t source = 0; source < held.size(); ++source) {
      if (held[distance][source]) most = std::max(most, q_rows[source]);
    }
    rows += most;
  }
  return rows;
}

}  // namespace

bool QRoute::IsSeenByOthers(int source) const {
  for (int step = 1; step < steps(); ++step) {
    if (Works(step, source)) return true;
  }
  return false;
}

std::vector<int> QRoute::SourcesAt(int rank, int step) const {
  std::vector<int> sources = {rank, SourceOf(rank, step)};
  if (!direct) sources.push_back(SourceOf(rank, step - 1));
  std::sort(sources.begin(), sources.end());
  sources.erase(std::unique(sources.begin(), sources.end()), sources.end());
  return sources;
}

QRoute MakeQRoute(const ShardPlan& plan, const RingSpans& pieces, bool gathered) {
  QRoute route;
  const int world_size = route.world_size = plan.world_size;
  route.gathered = gathered;
  for (const Shard& shard : plan.q) route.q_rows.push_back(RowsIn(shard));
  for (const Shard& shard : plan.kv) route.kv_rows.push_back(RowsIn(shard));
  for (int rank = 0; rank < world_size; ++rank) {
    for (int source = 0; source < world_size; ++source) {
      route.work.push_back(pieces.Work(source, rank, {0, route.kv_rows[rank]}));
    }
  }
  Held needed(world_size, std::vector<char>(world_size));
  for (int distance = 0; distance < world_size; ++distance) {
    for (int source = 0; source < world_size; ++source) {
      needed[distance][source] = route.Work((source + distance) % world_size, source).pairs > 0;
    }
  }
  const Held relayed = Relayed(needed);
  // As for keys (kv_route.cc): direct exchange must save a quarter of the exchange
  route.direct = gathered || 4 * RowsOnCriticalPath(needed, route.q_rows) <
                                 3 * RowsOnCriticalPath(relayed, route.q_rows);
  for (int distance = 0; distance < world_size; ++distance) {
    const std::vector<char>& held = (route.direct ? needed : relayed)[distance];
    if (distance > 0 && std::find(held.begin(), held.end(), 1) == held.end()) continue;
    route.distances.push_back(distance);
    route.held.push_back(held);
    const std::vector<char>& works = needed[distance];
    route.works_any.push_back(distance > 0 &&
                              std::find(works.begin(), works.end(), 1) != works.end());
  }
  return route;
}

}  // namespace ringattn
