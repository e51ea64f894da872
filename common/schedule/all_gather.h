// The all-gather schedule. Every rank first receives all rows of K/V that its queries see, directly
// from their owners, and then computes over all of them in one call. So partials are neither merged
// nor rounded in between. In a backward, a rank sums dk and dv of other ranks' rows in fp32, next
// to the gathered rows, and sends them to their owner. The owner adds them in rank order, so
// results do not depend on timing.
//
// The schedule needs two exchanges for any ring size, where the ring schedule needs one per rank.
// In return a rank holds the keys of the whole sequence (in a backward also their fp32 gradients),
// and no computation overlaps the exchange.
#ifndef RINGATTN_COMMON_SCHEDULE_ALL_GATHER_H_
#define RINGATTN_COMMON_SCHEDULE_ALL_GATHER_H_

#include <vector>

#include "common/layout/shard_plan.h"
#include "common/program/program.h"
#include "common/schedule/kv_route.h"
#include "common/schedule/schedule_table.h"

namespace ringattn {

// The part of the schedule that all ranks share.
struct GatherRoute {
  RingSpans pieces;
  // seen[rank][source]: rows of source's kv shard that the rank sees, disjoint and ascending.
  std::vector<std::vector<std::vector<RowRange>>> seen;
  std::vector<int64_t> q_rows;   // by rank
  std::vector<int64_t> kv_rows;  // by rank

  bool direct() const { return false; }
};

// Calls action(rank, source, rows, gathered, landing) for every range of another rank's rows that a
// rank sees, by rank and then source. `gathered` counts the rows before it among those that the
// rank gathers; `landing` counts those before it among the gradient rows that the owner receives.
template <typename Do>
void ForEachGathered(const GatherRoute& route, const Do& action) {
  const int world_size = static_cast<int>(route.seen.size());
  std::vector<int64_t> landing(world_size, 0);
  for (int rank = 0; rank < world_size; ++rank) {
    int64_t gathered = 0;
    for (int source = 0; source < world_size; ++source) {
      if (source == rank) continue;
      for (const RowRange& rows : route.seen[rank][source]) {
        action(rank, source, rows, gathered, landing[source]);
        gathered += rows.size();
        landing[source] += rows.size();
      }
    }
  }
}

GatherRoute MakeGatherRoute(const ScheduleContext& context);

// With heads_per_step, gathers groups of heads (head_groups.h).
Program MakeAllGatherProgram(const ScheduleContext& context, const GatherRoute& route, int rank);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_ALL_GATHER_H_
