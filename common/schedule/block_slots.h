// BlockSlots assigns buffer space to the blocks of a ring pass. Two slots alternate: a call
// computes on the block in one slot while the next block arrives in the other.
#ifndef RINGATTN_COMMON_SCHEDULE_BLOCK_SLOTS_H_
#define RINGATTN_COMMON_SCHEDULE_BLOCK_SLOTS_H_

#include "common/attention/band.h"
#include "common/schedule/bundle.h"
#include "common/schedule/kv_route.h"

namespace ringattn {

// The assignment is the same on every rank. Not thread safe.
class BlockSlots {
 public:
  // Slots of the K/V bundle. The rank's own block is in kHome. kHome is one of the two alternating
  // slots, or a third slot if the own block outlives the pass.
  static constexpr int kHome = 0;
  static const char* const kKvNames[3];
  // Slots of the gradient bundle: two for blocks that travel, the owner's accumulators, and two in
  // which contributions from several ranks arrive alternately before they are added.
  static constexpr int kGradientHome = 2;
  static constexpr int kLanding = 3;
  static const char* const kGradientNames[5];

  // `route` must outlive the slots.
  BlockSlots(const KvRoute& route, bool keeps_home) : route_(route), keeps_home_(keeps_home) {}

  // Assigns the step's blocks to their slot. Returns false if an earlier pass has left the same
  // blocks there.
  bool Claim(int step);

  // Return the location of `rows`, inside one of the held ranges, in the block of `source` that its
  // holder has at `step`. Gradients requires step > 0.
  BlockLocation Kv(int source, int step, const RowRange& rows) const;
  BlockLocation Gradients(int source, int step, const RowRange& rows) const;
  // Returns the location of the whole shard's gradients at their owner.
  BlockLocation HomeGradients(int source) const;
  // Returns where `rows` arrive that are sent to their owner at program step `at`.
  static BlockLocation Landing(int64_t at, const RowRange& rows);

 private:
  int KvSlot(int step) const { return keeps_home_ && step > 0 ? 2 - step % 2 : step % 2; }
  BlockLocation InBlock(int slot, int source, int step, const RowRange& rows) const;

  const KvRoute& route_;
  const bool keeps_home_;
  int claimed_by_[3] = {0, -1, -1};  // by slot: the step whose blocks it holds
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_BLOCK_SLOTS_H_
