#include "common/schedule/ring/ring_work.h"

#include <map>
#include <utility>

namespace ringattn {

std::vector<WorkCount> WorkOfBlock(const KvRoute& route, const RingSpans& pieces, int step,
                                   int source) {
  const HeldBlock& block = route.Block(step, source);
  const int holder = route.HolderOf(source, step);
  const bool by_part = route.rule == PartRule::kPipeline && step > 0;
  std::vector<WorkCount> counts;
  for (size_t range = 0; range < block.ranges.size(); ++range) {
    const bool sees = by_part ? (block.sees >> range & 1) != 0 : block.sees != 0;
    counts.push_back(sees ? pieces.Work(holder, source, block.ranges[range]) : WorkCount{});
  }
  return counts;
}

RingWork::RingWork(const KvRoute& route, const RingSpans& pieces) : world_size_(route.world_size) {
  std::map<std::vector<std::pair<int64_t, int64_t>>, int32_t> known;
  std::vector<std::pair<int64_t, int64_t>> key;
  ids_.reserve(static_cast<size_t>(route.steps()) * world_size_);
  for (int step = 0; step < route.steps(); ++step) {
    for (int source = 0; source < world_size_; ++source) {
      std::vector<WorkCount> counts = WorkOfBlock(route, pieces, step, source);
      if (!ids_.empty() && values_[ids_.back()] == counts) {
        ids_.push_back(ids_.back());
        continue;
      }
      key.clear();
      for (const WorkCount& count : counts) key.emplace_back(count.tiles, count.pairs);
      const auto [found, is_new] = known.try_emplace(key, static_cast<int32_t>(values_.size()));
      if (is_new) values_.push_back(std::move(counts));
      ids_.push_back(found->second);
    }
  }
}

}  // namespace ringattn
