// Dilated attention: level by level, the programs of a level's parts (common/layout/dilation.h),
// each the same as that of a request of its own, side by side between two copies. What the parts
// have of the inputs is gathered before them, and their results are merged into, or added to, the
// whole's after them, by one call for all of them: the first level's makes the partial, or the sum,
// and the last one's the results. A part of all tokens and heads (a rate of 1) reads the inputs
// where they are, and the first of all, if it is one, makes what the others are merged into or
// added to. Any kind of schedule; what travels is a part's tokens and heads, of all parts of a
// level at once.
//
// Levels take turns with the same buffers.
#ifndef RINGATTN_COMMON_SCHEDULE_DILATED_H_
#define RINGATTN_COMMON_SCHEDULE_DILATED_H_

#include <memory>
#include <vector>

#include "common/attention/attention_spec.h"
#include "common/layout/dilation.h"
#include "common/layout/shard_plan.h"
#include "common/program/program.h"
#include "common/schedule/cancel_latch.h"
#include "common/schedule/schedule.h"

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

#endif  // RINGATTN_COMMON_SCHEDULE_DILATED_H_
