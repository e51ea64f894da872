// One rank's program of a ring in the making: what a forward and a backward pass share.
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

// Passes walk over everything that moves, between whatever ranks, in one order that all
// ranks agree on, and the builder keeps this rank's part: so sends match receives.
struct RingRank {
  // `route`, `pieces` and `builder` outlive it.
  //   keeps_home: the rank's own K/V block outlives the pass
  RingRank(const KvRoute& route, const RingSpans& pieces, bool keeps_home,
           const ShardBuffers& shard, ProgramBuilder& builder);

  int rank() const { return builder.rank(); }

  // Sends `rows`, held at `step`, to their holder from whoever has them before.
  void FetchKv(int64_t at, int source, int step, const RowRange& rows);
  // This rank's keys at `step`, without gradients.
  KvOperand Keys(int step, const RowRange& rows);
  // Those of `source` that lie at a place of their own.
  KvOperand Keys(int source, const RowRange& rows, const BlockLocation& place);
  // Of this rank's queries with rows of `source`; counted once.
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
