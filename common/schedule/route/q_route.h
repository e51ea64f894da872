// QRoute: whose queries every rank computes on at every step of a schedule with resident keys, and
// which rank sends them. The schedule turns it into buffers, transfers and calls.
#ifndef RINGATTN_COMMON_SCHEDULE_ROUTE_Q_ROUTE_H_
#define RINGATTN_COMMON_SCHEDULE_ROUTE_Q_ROUTE_H_

#include <cstdint>
#include <vector>

#include "common/layout/shard_plan.h"
#include "common/schedule/route/kv_route.h"
#include "common/schedule/route/work_count.h"

namespace ringattn {

// A shard's queries always move as a whole.
struct QRoute {
  int world_size = 1;
  // Every rank receives others' queries before it computes on any of them, and keeps them.
  bool gathered = false;
  // Queries come from their owner. False: at step k a rank passes on the queries that it held at
  // step k - 1.
  bool direct = false;
  std::vector<int64_t> q_rows;   // by rank
  std::vector<int64_t> kv_rows;  // by rank
  // Step k computes on the queries of the rank at this distance to the left. distances[0] is 0, the
  // rank's own queries. Distances without transfers are left out.
  std::vector<int> distances;
  std::vector<std::vector<char>> held;  // [step][source]: whether its holder at the step has them
  std::vector<WorkCount> work;          // by rank, then source: see Work
  // By step: whether some holder has work with others' queries. Not set for step 0.
  std::vector<char> works_any;

  int steps() const { return static_cast<int>(distances.size()); }
  int SourceOf(int rank, int step) const {
    return (rank + world_size - distances[step]) % world_size;
  }
  int HolderOf(int source, int step) const { return (source + distances[step]) % world_size; }
  int SenderTo(int source, int step) const { return direct ? source : HolderOf(source, step - 1); }
  // Returns the work of source's queries with rank's keys.
  const WorkCount& Work(int rank, int source) const { return work[rank * world_size + source]; }
  // Returns whether the holder at the step has work with the source's queries.
  bool Works(int step, int source) const { return Work(HolderOf(source, step), source).pairs > 0; }
  // Returns whether a rank other than the owner has work with them.
  bool IsSeenByOthers(int source) const;
  // Returns, ascending, the sources whose queries or partials the rank receives or sends at a step.
  std::vector<int> SourcesAt(int rank, int step) const;
};

// Makes the route of a plan. A gathered route (QRoute::gathered) is always direct.
QRoute MakeQRoute(const ShardPlan& plan, const RingSpans& pieces, bool gathered);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_ROUTE_Q_ROUTE_H_
