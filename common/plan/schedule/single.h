// One rank, nothing travels: a forward pass is one call, a backward pass one step.
#ifndef RINGATTN_COMMON_PLAN_SCHEDULE_SINGLE_H_
#define RINGATTN_COMMON_PLAN_SCHEDULE_SINGLE_H_

#include "common/plan/schedule.h"
#include "common/plan/schedule/cancel_latch.h"
#include "common/plan/schedule/program_builder.h"

namespace ringattn {

// REQUIRES: the plan has one rank.
Program MakeSingleProgram(const AttentionSpec& spec, const ShardPlan& plan, Direction direction,
                          bool recompute_forward, CancelLatch& latch);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PLAN_SCHEDULE_SINGLE_H_
