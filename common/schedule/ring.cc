#include "common/schedule/ring.h"

#include <memory>
#include <utility>

#include "common/schedule/program_builder.h"
#include "common/schedule/ring_backward.h"
#include "common/schedule/ring_forward.h"
#include "common/schedule/ring_rank.h"
#include "common/schedule/shard_buffers.h"

namespace ringattn {

namespace {

// Finds the steps of a program's passes: as if for a rank that has no transfers and no calls.
RingPasses MakePasses(const ScheduleContext& context, const RingSpans& pieces, const KvRoute& kv,
                      BlockSlots& slots) {
  ProgramBuilder builder(context.spec, context.plan, kNoRank);
  RingRank ring(kv, pieces, slots, ShardBuffers(), builder);
  RingPasses passes;
  int64_t steps = 0;
  if (HasForward(context.recipe)) {
    slots.ClaimAll();
    UseRingForward(ring, 0);
    steps = kv.steps();
  }
  if (HasBackward(context.recipe)) {
    passes.backward_fetches = slots.ClaimAll();
    UseRingBackward(ring, passes.backward_fetches, steps);
  }
  passes.used_steps = builder.used_steps();
  return passes;
}

}  // namespace

RingRoute MakeRingRoute(const ScheduleContext& context) {
  RingSpans pieces(context.spec, context.plan, context.latch);
  const ProgramRecipe& recipe = context.recipe;
  const bool backward = HasBackward(recipe);
  const int group_size = recipe.schedule == ScheduleKind::kDoubleRing
                             ? static_cast<int>(recipe.group_size)
                             : context.plan.world_size;
  auto kv = std::make_unique<const KvRoute>(MakeKvRoute(
      context.plan, pieces, backward ? PartRule::kPipeline : PartRule::kSlices, group_size));
  // Direct exchange needs the own block twice; so does a backward, which computes on it last.
  BlockSlots slots(*kv, /*keeps_home=*/recipe.keeps_inputs || kv->direct || backward);
  RingPasses passes = MakePasses(context, pieces, *kv, slots);
  return {std::move(pieces), std::move(kv), std::move(slots), std::move(passes)};
}

Program MakeRingProgram(const ScheduleContext& context, const RingRoute& route, int rank) {
  return MakeRingPart(context, route, rank, WholeProgram(route), /*counted=*/nullptr);
}

RingPart WholeProgram(const RingRoute& route) {
  RingPart part;
  part.forward_calls = part.forward_fetches = part.backward = route.kv->AllVisits();
  return part;
}

Program MakeRingPart(const ScheduleContext& context, const RingRoute& route, int rank,
                     const RingPart& part, const RingWork* counted) {
  const ProgramRecipe& recipe = context.recipe;
  ProgramBuilder builder(context.spec, context.plan, rank);
  const ShardBuffers shard = AddShardBuffers(recipe.direction, recipe.recompute_forward, builder);
  builder.UseAll(route.passes.used_steps);
  RingRank ring(*route.kv, route.pieces, route.slots, shard, builder);
  ring.counted = counted;
  int64_t steps = 0;
  if (HasForward(recipe)) steps = AddRingForward(ring, 0, part);
  if (HasBackward(recipe)) {
    AddRingBackward(ring, route.passes.backward_fetches, steps, part);
  }
  return builder.Finish();
}

}  // namespace ringattn
