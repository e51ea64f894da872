#include "common/schedule/single.h"

#include <utility>

#include "common/schedule/program_builder.h"
#include "common/schedule/route/kv_route.h"
#include "common/schedule/shard_buffers.h"

namespace ringattn {

Program MakeSingleProgram(const ScheduleContext& context, const SingleRoute&, int rank) {
  const auto& [spec, plan, recipe, latch] = context;
  ProgramBuilder builder(spec, plan, rank);
  ShardBuffers shard = AddShardBuffers(recipe.direction, recipe.recompute_forward, builder);
  const RowRange all{0, builder.kv_rows()};
  const WorkCount work = RingSpans(spec, plan, latch).Work(0, 0, all);
  KvOperand keys{0, all.begin, all.end, builder.Whole(shard.k), builder.Whole(shard.v)};
  keys.segment_ids = builder.WholeIfAny(shard.kv_segment_ids);
  int64_t step = 0;
  if (recipe.direction == Direction::kForward || recipe.recompute_forward) {
    CallsAt calls;
    if (work.pairs > 0) AddOperand(calls.emplace_back().second, keys, work);
    AddForwardCalls(std::move(calls), step++, shard, builder);
  }
  if (recipe.direction == Direction::kBackward) {
    StartBackward(step, shard, builder);
    keys.dk = builder.Whole(shard.dk_acc);
    keys.dv = builder.Whole(shard.dv_acc);
    builder.AddZero(step, keys.dk);
    builder.AddZero(step, keys.dv);
    if (work.pairs > 0) {
      ComputeCall call = BackwardCallOf(shard, builder);
      AddOperand(call, keys, work);
      AddBackwardCall(step, std::move(call), shard, builder);
    }
    FinishBackward(step, shard, builder);
  }
  return builder.Finish();
}

}  // namespace ringattn
