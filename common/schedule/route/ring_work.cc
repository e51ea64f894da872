#include "common/schedule/route/ring_work.h"

#include <map>
#include <utility>

namespace ringattn {

namespace {

// The pieces of the last block, because a source's block is the same at most steps.
class BlockKeys {
 public:
  BlockKeys(const KvRoute& route, const RingSpans& pieces) : route_(route), pieces_(pieces) {}

  // Stores the work of the block's holder at the step, by range.
  void Count(int step, int source, std::vector<WorkCount>& counts) {
    const int id = route_.BlockId(step, source);
    const HeldBlock& block = route_.blocks[id];
    if (source != source_ || id != block_) {
      source_ = source;
      block_ = id;
      keys_.clear();
      for (const RowRange& rows : block.ranges) keys_.push_back(pieces_.KeysOf(source, rows));
    }
    const int holder = route_.HolderOf(source, step);
    const bool by_part = route_.rule == PartRule::kPipeline && step > 0;
    counts.clear();
    for (size_t range = 0; range < keys_.size(); ++range) {
      const bool sees = by_part ? (block.sees >> range & 1) != 0 : block.sees != 0;
      counts.push_back(sees ? pieces_.Work(holder, keys_[range]) : WorkCount{});
    }
  }

 private:
  const KvRoute& route_;
  const RingSpans& pieces_;
  int source_ = -1;
  int block_ = -1;
  std::vector<std::vector<Piece>> keys_;  // by range
};

}  // namespace

std::vector<WorkCount> WorkOfBlock(const KvRoute& route, const RingSpans& pieces, int step,
                                   int source) {
  std::vector<WorkCount> counts;
  BlockKeys(route, pieces).Count(step, source, counts);
  return counts;
}

RingWork::RingWork(const KvRoute& route, const RingSpans& pieces) : world_size_(route.world_size) {
  std::map<std::vector<std::pair<int64_t, int64_t>>, int32_t> known;
  std::vector<std::pair<int64_t, int64_t>> key;
  std::vector<WorkCount> counts;
  BlockKeys keys(route, pieces);
  ids_.resize(static_cast<size_t>(route.steps()) * world_size_);
  int32_t last = -1;
  for (int source = 0; source < world_size_; ++source) {
    for (int step = 0; step < route.steps(); ++step) {
      keys.Count(step, source, counts);
      int32_t& id = ids_[static_cast<size_t>(step) * world_size_ + source];
      if (last >= 0 && values_[last] == counts) {  // as mostly, without a search
        id = last;
        continue;
      }
      key.clear();
      for (const WorkCount& count : counts) key.emplace_back(count.tiles, count.pairs);
      const auto [found, is_new] = known.try_emplace(key, static_cast<int32_t>(values_.size()));
      if (is_new) values_.push_back(counts);
      id = last = found->second;
    }
  }
}

}  // namespace ringattn
