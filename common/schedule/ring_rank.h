// RingRank: one rank's program of a ring under construction, shared by its forward and backward
// pass.
#ifndef RINGATTN_COMMON_SCHEDULE_RING_RANK_H_
#define RINGATTN_COMMON_SCHEDULE_RING_RANK_H_

#include <cstdint>
#include <map>
#include <utility>

#include "common/program/program.h"
#include "common/schedule/block_slots.h"
#include "common/schedule/bundle.h"
#include "common/schedule/kv_route.h"
#include "common/schedule/program_builder.h"
#include "common/schedule/shard_buffers.h"

namespace ringattn {

// Passes visit every transfer between any two ranks in one order that all ranks agree on, and the
// builder keeps this rank's transfers. So sends match receives. Not thread safe.
struct RingRank {
  // `route`, `pieces` and `builder` must outlive it.
  //   keeps_home  the rank's own K/V block outlives the pass
  RingRank(const KvRoute& route, const RingSpans& pieces, bool keeps_home,
           const ShardBuffers& shard, ProgramBuilder& builder);

  int rank() const { return builder.rank(); }

  // Sends `rows` to their holder at `step` from the rank that holds them before. The transfer may
  // take program steps [at, end).
  void FetchKv(int64_t at, int64_t end, int source, int step, const RowRange& rows);
  // Returns this rank's keys at `step`, without gradients.
  KvOperand Keys(int step, const RowRange& rows);
  // Returns keys of `source` at a given location.
  KvOperand Keys(int source, const RowRange& rows, const BlockLocation& place);
  // Returns the work of this rank's queries with rows of `source`. Computed once.
  const WorkCount& Work(int source, const RowRange& rows);

  const KvRoute& route;
  const RingSpans& pieces;
  ProgramBuilder& builder;
  ShardBuffers shard;
  BlockSlots slots;
  Bundle kv;
  Bundle gradients;  // backward

 private:
  std::map<std::pair<int, std::pair<int64_t, int64_t>>, WorkCount> work_;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_RING_RANK_H_
