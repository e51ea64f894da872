// The work of ranks with the blocks that they hold in a ring pass.
#ifndef RINGATTN_COMMON_SCHEDULE_ROUTE_RING_WORK_H_
#define RINGATTN_COMMON_SCHEDULE_ROUTE_RING_WORK_H_

#include <cstdint>
#include <vector>

#include "common/schedule/route/kv_route.h"
#include "common/schedule/route/work_count.h"

namespace ringattn {

// Returns, by range of the block (HeldBlock::ranges), the work of its holder at the step.
std::vector<WorkCount> WorkOfBlock(const KvRoute& route, const RingSpans& pieces, int step,
                                   int source);

// The work of all holders. Most blocks have equal work, so each value is stored once.
class RingWork {
 public:
  RingWork(const KvRoute& route, const RingSpans& pieces);

  const std::vector<WorkCount>& Of(int step, int source) const { return values_[Id(step, source)]; }
  // Blocks with equal numbers have equal work.
  int32_t Id(int step, int source) const {
    return ids_[static_cast<size_t>(step) * world_size_ + source];
  }

 private:
  const int world_size_;
  std::vector<int32_t> ids_;  // by step, then source
  std::vector<std::vector<WorkCount>> values_;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_ROUTE_RING_WORK_H_
