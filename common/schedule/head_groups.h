// The all-gather schedule in groups of kv heads. Ranks pack the K/V of a group, send them to the
// ranks that see them, and compute with the query heads that share them. Meanwhile the next group
// travels and the group after that is packed. Each group is a separate problem with fewer heads;
// its out, lse and gradients are those heads of the request's. So memory for others' rows is that
// of two groups, not of all heads.
//
// In a backward, dk and dv of others' rows (fp32, heads of one group) travel to their owner while
// the next group computes. The owner adds them in rank order.
#ifndef RINGATTN_COMMON_SCHEDULE_HEAD_GROUPS_H_
#define RINGATTN_COMMON_SCHEDULE_HEAD_GROUPS_H_

#include "common/program/program.h"
#include "common/schedule/all_gather.h"
#include "common/schedule/schedule_table.h"

namespace ringattn {

// REQUIRES: heads_per_step is a proper divisor of num_kv_heads. A bias with a gradient has one
// plane per head, because no single group can compute the sum over heads.
Program MakeHeadGroupsProgram(const ScheduleContext& context, const GatherRoute& route, int rank);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_HEAD_GROUPS_H_
