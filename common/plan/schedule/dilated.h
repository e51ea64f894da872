// Dilated attention: the programs of its parts (common/plan/dilation.h) one after another, each the
// same as that of a request of its own, between two copies. What the part has of the inputs is
// gathered before it, and its results are merged into, or added to, the whole's after it. A part of
// all tokens and heads (a rate of 1) reads the inputs where they are, and the first of all, if it
// is one, makes the partial that the others are merged into. Any kind of schedule; what travels is
// a part's tokens and heads.
//
// Parts use two sets of buffers in turn, so that one's may be gathered and travel while the one
// before it computes.
#ifndef RINGATTN_COMMON_PLAN_SCHEDULE_DILATED_H_
#define RINGATTN_COMMON_PLAN_SCHEDULE_DILATED_H_

#include <memory>
#include <vector>

#include "common/attention/attention_spec.h"
#include "common/plan/dilation.h"
#include "common/plan/program.h"
#include "common/plan/schedule.h"
#include "common/plan/schedule/cancel_latch.h"
#include "common/plan/shard_plan.h"

namespace ringattn {

// What the ranks have in common. Not copied: builders refer to the parts.
struct DilatedRoute {
  std::vector<DilatedPart> parts;
  // By part; empty where there is no such pass.
  std::vector<std::unique_ptr<ScheduleBuilder>> forward;
  std::vector<std::unique_ptr<ScheduleBuilder>> backward;

  bool direct() const;  // of any
};

// `latch` outlives the route.
DilatedRoute MakeDilatedRoute(const AttentionSpec& spec, const ShardPlan& plan, ScheduleKind kind,
                              Direction direction, bool recompute_forward, CancelLatch* latch);

Program MakeDilatedProgram(const AttentionSpec& spec, const ShardPlan& plan, Direction direction,
                           bool recompute_forward, const DilatedRoute& route, int rank);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PLAN_SCHEDULE_DILATED_H_
