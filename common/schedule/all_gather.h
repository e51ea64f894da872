// The all-gather schedule: every rank first gets all rows of K/V that its queries see, straight
// from their owners, and then computes in one call over all of them, so partials are neither merged
// nor rounded in between. Backward likewise: dk and dv of others' rows are summed up in fp32 beside
// the gathered rows, go to their owner at once and are added there in the order of ranks, so
// results do not depend on timing.
//
// Two exchanges however large the ring, where the ring has one per rank; but a rank holds the keys
// of the whole sequence (backward with fp32 gradients beside them), and nothing computes while they
// travel.
#ifndef RINGATTN_COMMON_SCHEDULE_ALL_GATHER_H_
#define RINGATTN_COMMON_SCHEDULE_ALL_GATHER_H_

#include <vector>

#include "common/layout/shard_plan.h"
#include "common/program/program.h"
#include "common/schedule/kv_route.h"

namespace ringattn {

// What its ranks have in common.
struct GatherRoute {
  // seen[rank][source]: rows of source's kv shard that the rank sees, disjoint and ascending.
  std::vector<std::vector<std::vector<RowRange>>> seen;
  std::vector<int64_t> q_rows;   // by rank
  std::vector<int64_t> kv_rows;  // by rank
};

// Calls action(rank, source, rows, gathered, landing) for every range of another's rows that a rank
// sees, by rank and source, with the rows before it among those that the rank gathers and among
// those that the owner gets back.
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

GatherRoute MakeGatherRoute(const ShardPlan& plan, const RingSpans& pieces);

Program MakeAllGatherProgram(const AttentionSpec& spec, const ShardPlan& plan, Direction direction,
                             bool recompute_forward, const GatherRoute& route,
                             const RingSpans& pieces, int rank);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_ALL_GATHER_H_
