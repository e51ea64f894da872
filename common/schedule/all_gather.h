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

#include <cstdint>
#include <vector>

#include "common/layout/shard_plan.h"
#include "common/program/program.h"
#include "common/schedule/route/kv_route.h"
#include "common/schedule/schedule_table.h"

namespace ringattn {

// A range of `source`'s rows that `rank` sees.
struct GatheredRows {
  int rank = 0;
  int source = 0;
  RowRange rows;
  int64_t gathered = 0;  // rows before it among those that the rank gathers
  int64_t landing = 0;   // rows before it among the gradient rows that the owner receives
};

// The part of the schedule that all ranks share.
struct GatherRoute {
  RingSpans pieces;
  // seen[rank][source]: rows of source's kv shard that the rank sees, disjoint and ascending.
  std::vector<std::vector<std::vector<RowRange>>> seen;
  std::vector<int64_t> q_rows;   // by rank
  std::vector<int64_t> kv_rows;  // by rank
  // All ranges of other ranks' rows, by rank and then source.
  std::vector<GatheredRows> gathered;
  // By rank: the indices, ascending, of those that the rank receives or sends.
  std::vector<std::vector<int32_t>> of_rank;

  bool direct() const { return false; }
};

// Calls action(rank, source, rows, gathered, landing) for every range that `own_rank` receives or
// sends (GatheredRows), by rank and then source.
template <typename Do>
void ForEachGathered(const GatherRoute& route, int own_rank, const Do& action) {
  for (int32_t index : route.of_rank[own_rank]) {
    const GatheredRows& range = route.gathered[index];
    action(range.rank, range.source, range.rows, range.gathered, range.landing);
  }
}

GatherRoute MakeGatherRoute(const ScheduleContext& context);

// With heads_per_step, gathers groups of heads (head_groups.h).
Program MakeAllGatherProgram(const ScheduleContext& context, const GatherRoute& route, int rank);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_ALL_GATHER_H_
