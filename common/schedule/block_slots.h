// What lies where at a step of a ring pass. Two slots alternate: the block of a step is
// computed on in one while the next one arrives in the other.
#ifndef RINGATTN_COMMON_SCHEDULE_BLOCK_SLOTS_H_
#define RINGATTN_COMMON_SCHEDULE_BLOCK_SLOTS_H_

#include "common/attention/band.h"
#include "common/schedule/bundle.h"
#include "common/schedule/kv_route.h"

namespace ringattn {

// The same on every rank: nothing here depends on one. Not thread safe.
class BlockSlots {
 public:
  // Slots of the K/V bundle. The rank's own block lies in kHome, which is one of the two
  // that alternate, or, where the block outlives the pass, a third one.
  static constexpr int kHome = 0;
  static const char* const kKvNames[3];
  // Slots of the gradient bundle: two that travel, the owner's accumulators, and two where
  // contributions from several ranks arrive in turn before they are added.
  static constexpr int kGradientHome = 2;
  static constexpr int kLanding = 3;
  static const char* const kGradientNames[5];

  // `route` outlives the slots.
  BlockSlots(const KvRoute& route, bool keeps_home) : route_(route), keeps_home_(keeps_home) {}

  // From now on the step's blocks are to lie in their slot. False: they lie there already,
  // as an earlier pass left them.
  bool Claim(int step);

  // Place of `rows`, inside one of the ranges held, in the block of `source` that its
  // holder has at `step`. Gradients: step > 0.
  BlockLocation Kv(int source, int step, const RowRange& rows) const;
  BlockLocation Gradients(int source, int step, const RowRange& rows) const;
  // The whole shard's gradients at their owner.
  BlockLocation HomeGradients(int source) const;
  // Where `rows` land that are sent home at program step `at`.
  static BlockLocation Landing(int64_t at, const RowRange& rows);

 private:
  int KvSlot(int step) const { return keeps_home_ && step > 0 ? 2 - step % 2 : step % 2; }
  BlockLocation InBlock(int slot, int source, int step, const RowRange& rows) const;

  const KvRoute& route_;
  const bool keeps_home_;
  int claimed_by_[3] = {0, -1, -1};  // by slot: the step whose blocks lie there
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_BLOCK_SLOTS_H_
