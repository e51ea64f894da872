#include "common/schedule/ring_rank.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <set>

namespace ringattn {

RingRank::RingRank(const KvRoute& the_route, const RingSpans& the_pieces,
                   const BlockSlots& the_slots, const ShardBuffers& the_shard,
                   ProgramBuilder& the_builder)
    : route(the_route),
      pieces(the_pieces),
      builder(the_builder),
      shard(the_shard),
      slots(the_slots),
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

std::vector<int> RingRank::SourcesAt(int step, const std::vector<int>& others) const {
  std::vector<int> sources;
  if (rank() != kNoRank) {
    sources = {rank(), route.SourceOf(rank(), step),
               route.SourceOf(rank(), route.SenderStep(step))};
    for (int other : others) sources.push_back(route.SourceOf(rank(), other));
    std::sort(sources.begin(), sources.end());
    sources.erase(std::unique(sources.begin(), sources.end()), sources.end());
    return sources;
  }
  // Equal blocks are exchanged in equal steps.
  assert(others.size() <= 2);
  using Blocks = std::array<int, 3>;
  std::set<Blocks> different;
  Blocks last{-1, -1, -1};
  for (int source = 0; source < route.world_size; ++source) {
    Blocks blocks{route.BlockId(step, source), -1, -1};
    for (size_t i = 0; i < others.size(); ++i) blocks[i + 1] = route.BlockId(others[i], source);
    if (blocks[0] == last[0] && blocks[1] == last[1] && blocks[2] == last[2]) continue;
    if (different.insert(blocks).second) sources.push_back(source);
    last = blocks;
  }
  return sources;
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

WorkCount RingRank::Work(int source, const RowRange& rows) const {
  return pieces.Work(rank(), source, rows);
}

WorkCount RingRank::WorkAt(int step, const RowRange& rows) {
  const int source = route.SourceOf(rank(), step);
  const std::vector<RowRange>& held = route.Held(step, source);
  if (counted == nullptr) {
    work_.resize(route.steps());
    if (work_[step].empty()) work_[step] = WorkOfBlock(route, pieces, step, source);
  }
  const std::vector<WorkCount>& counts =
      counted == nullptr ? work_[step] : counted->Of(step, source);
  for (size_t i = 0; i < held.size(); ++i) {
    const bool is_it = held[i].begin == rows.begin && held[i].end == rows.end;
    if (is_it) return counts[i];
  }
  assert(false && "rows are not a range of the block");
  return {};
}

}  // namespace ringattn
