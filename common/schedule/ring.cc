#include "common/schedule/ring.h"

#include <utility>

#include "common/schedule/program_builder.h"
#include "common/schedule/ring_backward.h"
#include "common/schedule/ring_forward.h"
#include "common/schedule/ring_rank.h"
#include "common/schedule/shard_buffers.h"

namespace ringattn {

RingRoute MakeRingRoute(const ScheduleContext& context) {
  RingSpans pieces(context.spec, context.plan, context.latch);
  const bool forward = context.recipe.direction == Direction::kForward;
  const int group_size = context.recipe.schedule == ScheduleKind::kDoubleRing
                             ? static_cast<int>(context.recipe.group_size)
                             : context.plan.world_size;
  KvRoute route = MakeKvRoute(context.plan, pieces,
                              forward ? PartRule::kSlices : PartRule::kPipeline, group_size);
  return {std::move(pieces), std::move(route)};
}

Program MakeRingProgram(const ScheduleContext& context, const RingRoute& route, int rank) {
  const ProgramRecipe& recipe = context.recipe;
  const bool backward = recipe.direction == Direction::kBackward;
  ProgramBuilder builder(context.spec, context.plan, rank);
  const ShardBuffers shard = AddShardBuffers(recipe.direction, recipe.recompute_forward, builder);
  // Direct exchange needs the own block twice; so does a backward, which computes on it last.
  const bool keeps_home = recipe.keeps_inputs || route.direct() || backward;
  RingRank ring(route.kv, route.pieces, keeps_home, shard, builder);
  int64_t steps = 0;
  if (!backward || recipe.recompute_forward) steps = AddRingForward(ring, 0);
  if (backward) AddRingBackward(ring, steps);
  return builder.Finish();
}

}  // namespace ringattn
