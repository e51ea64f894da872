#include "common/schedule/single.h"

#include <utility>

#include "common/schedule/kv_route.h"
#include "common/schedule/shard_buffers.h"

namespace ringattn {

Program MakeSingleProgram(const AttentionSpec& spec, const ShardPlan& plan, Direction direction,
                          bool recompute_forward, CancelLatch& latch) {
  ProgramBuilder builder(spec, plan, 0);
  ShardBuffers shard = AddShardBuffers(direction, recompute_forward, builder);
  const RowRange all{0, builder.kv_rows()};
  const WorkCount work = RingSpans(spec, plan, &latch).Work(0, 0, all);
  KvOperand keys{0, all.begin, all.end, builder.Whole(shard.k), builder.Whole(shard.v)};
  keys.segment_ids = builder.WholeIfAny(shard.kv_segment_ids);
  int64_t step = 0;
  if (direction == Direction::kForward || recompute_forward) {
    CallsAt calls;
    if (work.pairs > 0) AddOperand(calls.emplace_back().second, keys, work);
    AddForwardCalls(std::move(calls), step++, shard, builder);
  }
  if (direction == Direction::kBackward) {
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
