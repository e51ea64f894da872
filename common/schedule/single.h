// The schedule of one rank, without exchange: a forward pass is one call, a backward pass one step.
#ifndef RINGATTN_COMMON_SCHEDULE_SINGLE_H_
#define RINGATTN_COMMON_SCHEDULE_SINGLE_H_

#include "common/schedule/cancel_latch.h"
#include "common/schedule/program_builder.h"
#include "common/schedule/schedule.h"

namespace ringattn {

// REQUIRES: the plan has one rank.
Program MakeSingleProgram(const AttentionSpec& spec, const ShardPlan& plan, Direction direction,
                          bool recompute_forward, CancelLatch& latch);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_SINGLE_H_
