// The schedules whose K/V stay where they are while queries travel. A rank computes its own
// queries' partial result over its own keys, then others' over the same keys, and sends each of
// those partials straight to its owner while it computes the next; the owner merges them
// (common/attention/merge.h), where sinks join and the result is rounded, once. Backward likewise:
// q, dout, lse and delta travel; dk and dv stay; the partials are of dq, which the owner adds up.
//
//   pass-Q        The queries go around the ring, two shards of others at a time on a rank, and a
//                 partial is merged as it comes in. A rank holds a few shards, whatever the ring
//                 size.
//   replicated-Q  Every rank gets all queries first. Partials come in one after another and are
//                 merged all at once, in the order of ranks. A rank holds the queries of the whole
//                 sequence and as much of partials, in fp32, beside 1/W of K/V.
//
// A partial goes home from where it is computed, instead of going around with the queries: as many
// bytes, but no rank waits for another's partial before it can begin its own.
//
// Orders are fixed by the schedule, so results do not depend on timing.
#ifndef RINGATTN_COMMON_SCHEDULE_RESIDENT_KEYS_H_
#define RINGATTN_COMMON_SCHEDULE_RESIDENT_KEYS_H_

#include "common/layout/shard_plan.h"
#include "common/program/program.h"
#include "common/schedule/q_route.h"

namespace ringattn {

// The route says which of the two it is. A bias, its gradient and a mask are cut by keys
// (AttentionSpec::pairs_by_keys): every call takes the rank's whole one.
Program MakeResidentKeysProgram(const AttentionSpec& spec, const ShardPlan& plan,
                                Direction direction, bool recompute_forward, const QRoute& route,
                                int rank);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_RESIDENT_KEYS_H_
