// The all-gather schedule, some kv heads at a time: K/V of a group of heads are put together, go
// to the ranks that see them and are computed on with the query heads that share them, while the
// next group travels and the one behind it is put together. Each group is a problem of its own, of
// fewer heads, whose out, lse and gradients are those heads of the request's. So the memory for
// others' rows is that of two groups, not of all heads.
//
// Backward: dk and dv of others' rows, fp32 and of the group's heads, go to their owner while the
// next group computes, and are added there in the order of ranks.
#ifndef RINGATTN_COMMON_SCHEDULE_HEAD_GROUPS_H_
#define RINGATTN_COMMON_SCHEDULE_HEAD_GROUPS_H_

#include <cstdint>

#include "common/layout/shard_plan.h"
#include "common/program/program.h"
#include "common/schedule/all_gather.h"
#include "common/schedule/kv_route.h"

namespace ringattn {

// REQUIRES: heads_per_step divides num_kv_heads and is less; a bias whose gradient is wanted has
// one plane per head, as the sum over heads is no group's.
Program MakeHeadGroupsProgram(const AttentionSpec& spec, const ShardPlan& plan, Direction direction,
                              bool recompute_forward, const GatherRoute& route,
                              const RingSpans& pieces, int64_t heads_per_step, int rank);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_HEAD_GROUPS_H_
