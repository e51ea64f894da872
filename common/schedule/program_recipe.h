// ProgramRecipe: how the programs of a request are built.
#ifndef RINGATTN_COMMON_SCHEDULE_PROGRAM_RECIPE_H_
#define RINGATTN_COMMON_SCHEDULE_PROGRAM_RECIPE_H_

#include <cstdint>

#include "common/attention/attention_spec.h"
#include "common/attention/tuning.h"
#include "common/layout/shard_plan.h"
#include "common/schedule/schedule_kind.h"

namespace ringattn {

// A recipe, the request's spec and the ring size determine every rank's program. Every process that
// builds a program from equal values gets an equal program.
struct ProgramRecipe {
  ScheduleKind schedule = ScheduleKind::kSingle;
  Layout layout = Layout::kContiguous;
  int64_t stripe = 1;  // kStriped only
  Direction direction = Direction::kForward;
  // Backward without out and lse: a forward pass runs first in the same program.
  bool recompute_forward = false;
  // Forward: no input buffer is overwritten, so inputs can outlive the program or be lent to it.
  // Takes one more K/V buffer. Backward programs never overwrite inputs.
  bool keeps_inputs = false;
  // kAllGather: gathers and computes K/V of this many kv heads at a time (head_groups.h); 0: of
  // all.
  int64_t heads_per_step = 0;
  // kDoubleRing: ranks per group, in practice per host. Divides the ring size. 0 for other kinds.
  int64_t group_size = 0;
  Tuning tuning = {};  // of the kernels; affects neither plan nor program

  bool operator==(const ProgramRecipe&) const = default;
};

// Return whether a program has a forward pass, and a backward pass.
inline bool HasForward(const ProgramRecipe& recipe) {
  return recipe.direction == Direction::kForward || recipe.recompute_forward;
}
inline bool HasBackward(const ProgramRecipe& recipe) {
  return recipe.direction == Direction::kBackward;
}

// Returns the recipe of a schedule on the plan's layout and stripe, with defaults elsewhere.
inline ProgramRecipe RecipeOn(const ShardPlan& plan, ScheduleKind schedule, Direction direction,
                              bool recompute_forward = false) {
  return {.schedule = schedule,
          .layout = plan.layout,
          .stripe = plan.stripe,
          .direction = direction,
          .recompute_forward = recompute_forward};
}

// Returns the shards of the recipe's layout, with bias and mask sharded as its schedule requires.
// REQUIRES: world_size >= 1, stripe >= 1.
ShardPlan MakeShardPlan(const AttentionSpec& spec, const ProgramRecipe& recipe, int world_size);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_PROGRAM_RECIPE_H_
