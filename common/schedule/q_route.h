// QRoute: which rank computes on whose queries at every step of a schedule whose keys stay where
// they are, and how the queries get there. The schedule turns it into buffers, transfers and calls.
#ifndef RINGATTN_COMMON_SCHEDULE_Q_ROUTE_H_
#define RINGATTN_COMMON_SCHEDULE_Q_ROUTE_H_

#include <cstdint>
#include <vector>

#include "common/layout/shard_plan.h"
#include "common/schedule/kv_route.h"
#include "common/schedule/work_count.h"

namespace ringattn {

// A shard's queries always move together: no rank gets a part of them.
struct QRoute {
  int world_size = 1;
  // Every rank gets others' queries before it computes on any of them, and keeps them.
  bool gathered = false;
  // They come from their owner. False: at step k a rank passes on what it held at step k - 1.
  bool direct = false;
  std::vector<int64_t> q_rows;   // by rank
  std::vector<int64_t> kv_rows;  // by rank
  // Step k computes on the queries of the rank this far to the left; distances[0] is 0, the
  // rank's own. Distances over which nothing travels are left out.
  std::vector<int> distances;
  std::vector<std::vector<char>> held;  // [step][source]: its holder at the step has them
  std::vector<WorkCount> work;          // by rank, then source: see Work

  int steps() const { return static_cast<int>(distances.size()); }
  int SourceOf(int rank, int step) const {
    return (rank + world_size - distances[step]) % world_size;
  }
  int HolderOf(int source, int step) const { return (source + distances[step]) % world_size; }
  int SenderTo(int source, int step) const { return direct ? source : HolderOf(source, step - 1); }
  // Of source's queries with rank's keys.
  const WorkCount& Work(int rank, int source) const { return work[rank * world_size + source]; }
  // The holder at the step has work with the source's queries.
  bool Works(int step, int source) const { return Work(HolderOf(source, step), source).pairs > 0; }
  // Somebody but the owner does.
  bool IsSeenByOthers(int source) const;
};

//   gathered  QRoute::gathered, and then direct
QRoute MakeQRoute(const ShardPlan& plan, const RingSpans& pieces, bool gathered);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_Q_ROUTE_H_
