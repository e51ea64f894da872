#include "common/schedule/ring_rank.h"

namespace ringattn {

RingRank::RingRank(const KvRoute& the_route, const RingSpans& the_pieces, bool keeps_home,
                   const ShardBuffers& the_shard, ProgramBuilder& the_builder)
    : route(the_route),
      pieces(the_pieces),
      builder(the_builder),
      shard(the_shard),
      slots(the_route, keeps_home),
      kv(KvBundle(the_builder.spec(), slots.KvNames())),
      gradients(KvGradientBundle(the_builder.spec(), slots.GradientNames())) {
  kv.Of(TensorId::kK).slots[BlockSlots::kHome] = shard.k;
  kv.Of(TensorId::kV).slots[BlockSlots::kHome] = shard.v;
  if (shard.kv_segment_ids != kNoBuffer) {
    kv.Of(TensorId::kKvSegmentIds).slots[BlockSlots::kHome] = shard.kv_segment_ids;
  }
  gradients.Of(TensorId::kDk).slots[BlockSlots::kGradientHome] = shard.dk_acc;
  gradients.Of(TensorId::kDv).slots[BlockSlots::kGradientHome] = shard.dv_acc;
}

void RingRank::FetchKv(int64_t at, int64_t end, int source, int step, const RowRange& rows) {
  if (rows.empty()) return;
  const int from = route.SenderTo(source, step);
  const int to = route.HolderOf(source, step);
  if (from != rank() && to != rank()) return builder.Use(at);
  builder.Move(at, kv, from, slots.Kv(source, route.SenderStep(step), rows), to,
               slots.Kv(source, step, rows), rows, end - at);
}

KvOperand RingRank::Keys(int step, const RowRange& rows) {
  const int source = route.SourceOf(rank(), step);
  const BlockLocation place = slots.Kv(source, step, rows);
  return Keys(source, rows, place);
}

KvOperand RingRank::Keys(int source, const RowRange& rows, const BlockLocation& place) {
  KvOperand keys{source, rows.begin, rows.end, builder.Range(kv, TensorId::kK, place),
                 builder.Range(kv, TensorId::kV, place)};
  if (builder.spec().options.segment_ids) {
    keys.segment_ids = builder.Range(kv, TensorId::kKvSegmentIds, place);
  }
  return keys;
}

const WorkCount& RingRank::Work(int source, const RowRange& rows) {
  const auto [found, is_new] = work_.try_emplace({source, {rows.begin, rows.end}});
  if (is_new) found->second = pieces.Work(rank(), source, rows);
  return found->second;
}

}  // namespace ringattn
