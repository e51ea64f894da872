// The schedules in which K/V stay in place and queries travel. A rank computes the partial result
// of its own queries over its own keys, then those of others' queries over the same keys. It sends
// each partial directly to its owner while it computes the next. The owner merges the partials
// (common/attention/merge.h), adds sinks and rounds the result, once. In a backward q, dout, lse
// and delta travel; dk and dv stay; the owner adds up the partials of dq.
//
//   pass-Q        The queries travel around the ring. A rank holds at most two shards of others'
//                 queries at a time and merges each partial when it arrives. Memory is a few
//                 shards for any ring size.
//   replicated-Q  Every rank first receives all queries. Partials arrive one after another and
//                 are merged together, in rank order. A rank holds the queries of the whole
//                 sequence and fp32 partials of the same size, in addition to 1/W of K/V.
//
// A partial goes directly to its owner instead of around the ring with the queries. That moves the
// same number of bytes, but no rank waits for another's partial before it starts its own.
//
// The schedule fixes all orders, so results do not depend on timing.
#ifndef RINGATTN_COMMON_SCHEDULE_RESIDENT_KEYS_H_
#define RINGATTN_COMMON_SCHEDULE_RESIDENT_KEYS_H_

#include "common/program/program.h"
#include "common/schedule/route/q_route.h"
#include "common/schedule/schedule_table.h"

namespace ringattn {

struct ResidentKeysRoute {
  QRoute queries;

  bool direct() const { return queries.direct; }
};

ResidentKeysRoute MakePassQRoute(const ScheduleContext& context);
ResidentKeysRoute MakeReplicatedQRoute(const ScheduleContext& context);

// The program of both schedules. A bias, its gradient and a mask are sharded by keys (PairAxisOf):
// every call uses the rank's whole shard of them.
Program MakeResidentKeysProgram(const ScheduleContext& context, const ResidentKeysRoute& route,
                                int rank);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_RESIDENT_KEYS_H_
