// BlockSlots assigns buffer space to the blocks of a ring pass: to each visit's K/V and gradients,
// for as long as they are in use or in transfer. In a flat ring two slots alternate: a call
// computes on the block in one slot while the next block arrives in the other.
#ifndef RINGATTN_COMMON_SCHEDULE_BLOCK_SLOTS_H_
#define RINGATTN_COMMON_SCHEDULE_BLOCK_SLOTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "common/attention/band.h"
#include "common/schedule/bundle.h"
#include "common/schedule/route/kv_route.h"

namespace ringattn {

// The assignment is the same on every rank. Not thread safe.
class BlockSlots {
 public:
  // Slots of the K/V bundle. The rank's own block is in kHome, which later blocks may overwrite
  // unless the own block outlives the pass.
  static constexpr int kHome = 0;
  // Slots of the gradient bundle: the owner's accumulators; two in which contributions of several
  // ranks arrive alternately before they are added; and those of visits and outer hops.
  static constexpr int kGradientHome = 0;
  static constexpr int kLanding = 1;
  static constexpr int kVisits = 3;

  // `route` must outlive the slots.
  BlockSlots(const KvRoute& route, bool keeps_home);

  // Names of the slots of the two bundles.
  std::vector<std::string> KvNames() const;
  std::vector<std::string> GradientNames() const;

  // Assigns the blocks of a pass to their slots. Returns by step whether the block must be fetched,
  // that is, no earlier pass has left it there.
  std::vector<char> ClaimAll();

  // Return the slots of a visit's K/V, of its gradients, and of the sum that arrives at the owner.
  int KvSlot(int step) const { return kv_slots_[step]; }
  int GradientSlot(int step) const { return gradient_slots_[step]; }
  int OuterLandingSlot(int step) const { return outer_landings_[step]; }

  // Return the location of `rows`, inside one of the held ranges, in the block of `source` that its
  // holder has at `step`. Gradients requires step > 0 and parts as pipelined.
  BlockLocation Kv(int source, int step, const RowRange& rows) const;
  BlockLocation Gradients(int source, int step, const RowRange& rows) const;
  // Returns the location of the whole shard's gradients at their owner.
  BlockLocation HomeGradients(int source) const;
  // Returns where `rows` of a part arrive that are sent to their owner at program step `at`.
  static BlockLocation Landing(int64_t at, const RowRange& part, const RowRange& rows);
  // Returns where the sum of a round arrives at the owner, from its collector at `step`.
  BlockLocation OuterLanding(int source, int step, const RowRange& rows) const;

 private:
  BlockLocation InBlock(int slot, int source, int step, const RowRange& rows) const;

  const KvRoute& route_;
  // By step.
  std::vector<int> kv_slots_;
  std::vector<int> gradient_slots_;
  std::vector<int> outer_landings_;  // of collectors of outer rounds
  std::vector<int> fetch_order_;     // steps > 0
  std::vector<int> claimed_by_;      // by K/V slot: the step whose block it holds
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_BLOCK_SLOTS_H_
