// RingRank: one rank's program of a ring under construction, shared by its forward and backward
// pass.
#ifndef RINGATTN_COMMON_SCHEDULE_RING_RANK_H_
#define RINGATTN_COMMON_SCHEDULE_RING_RANK_H_

#include <cstdint>
#include <vector>

#include "common/program/program.h"
#include "common/schedule/block_slots.h"
#include "common/schedule/bundle.h"
#include "common/schedule/program_builder.h"
#include "common/schedule/route/kv_route.h"
#include "common/schedule/route/ring_work.h"
#include "common/schedule/shard_buffers.h"

namespace ringattn {

// The part of a program's passes that all ranks share.
struct RingPasses {
  // By program step: whether a rank has a transfer or a call in it.
  std::vector<char> used_steps;
  // By visit: whether the backward pass must fetch the block, because no forward pass before has
  // left it in its slot.
  std::vector<char> backward_fetches;
};

// Visits of a pass, ascending.
using Visits = std::vector<int>;

// The part of a program that is built. A part serves to compare ranks (ring_step_classes.h).
struct RingPart {
  Visits forward_calls;
  OtherCalls other_calls;  // of the forward pass, in other visits
  Visits forward_fetches;
  Visits backward;
  bool begins = true;  // the first step of the backward pass is built
  bool ends = true;    // the last step of the backward pass is built, for the own block
};

// Passes visit the transfers of a step in the order of their sources, on which all ranks agree, and
// the builder keeps this rank's transfers. So sends match receives. Not thread safe.
//
// A ring of kNoRank visits the transfers of all ranks, and its builder learns only their steps.
struct RingRank {
  // `route`, `pieces`, `slots` and `builder` must outlive it.
  RingRank(const KvRoute& route, const RingSpans& pieces, const BlockSlots& slots,
           const ShardBuffers& shard, ProgramBuilder& builder);

  int rank() const { return builder.rank(); }

  // Returns, ascending, the sources whose blocks this rank receives, computes on or sends at a
  // visit, or whose gradients it exchanges. A ring of kNoRank gets all sources whose blocks differ.
  //   others  at most two further visits at which the rank may have the block
  std::vector<int> SourcesAt(int step, const std::vector<int>& others) const;

  // Sends `rows` to their holder at `step` from the rank that holds them before. The transfer may
  // take program steps [at, end).
  void FetchKv(int64_t at, int64_t end, int source, int step, const RowRange& rows);
  // Returns this rank's keys at `step`, without gradients.
  KvOperand Keys(int step, const RowRange& rows);
  // Returns keys of `source` at a given location.
  KvOperand Keys(int source, const RowRange& rows, const BlockLocation& place);
  // Returns the work of this rank's queries with rows of `source`.
  WorkCount Work(int source, const RowRange& rows) const;
  // Returns the same for a range of the block that the rank holds at the step. Counted once.
  WorkCount WorkAt(int step, const RowRange& rows);

  const KvRoute& route;
  const RingSpans& pieces;
  ProgramBuilder& builder;
  ShardBuffers shard;
  const BlockSlots& slots;
  Bundle kv;
  Bundle gradients;                   // backward
  const RingWork* counted = nullptr;  // if not null: the work of all blocks that WorkAt gets

 private:
  // By visit: the work of the ranges that the rank holds; empty until counted. A recomputed forward
  // and its backward share it.
  std::vector<std::vector<WorkCount>> work_;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_RING_RANK_H_
