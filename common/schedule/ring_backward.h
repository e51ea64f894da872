// The backward pass of a ring that passes K/V. Other ranks' contributions to a block's dk and dv
// travel with the block in fp32. They travel in parts, so that one part is in transfer while the
// next computes. A part's accumulator starts at the first rank that contributes, and the last one
// sends it directly to its owner. The owner computes its own block last, on top of the
// contributions that have arrived. dq never travels. The schedule fixes the order of all additions,
// so results do not depend on timing.
//
// The parts of block k > 0 run in descending order: part p computes at step 1 + (k - 1) * parts +
// (parts - 1 - p). Its keys arrive `parts` steps earlier. Its accumulator leaves one step later,
// while the next part computes.
//
// Parts descend because of causal masks with zigzag: some ranks see the whole block, and others see
// only its first part, which takes them as long as both parts take the rest. In this order,
// gradients that leave at a step are complete at the same time on all ranks. Ranks that see a last
// part first compute it while the first part's accumulator is still in transfer. The rank's own
// block comes last: others' contributions arrive in its accumulators in the meantime, and nothing
// remains to wait for when it is done.
//
// The planner builds equal steps of ranks once. If what a rank does in a step begins to depend on
// something else, RingStepKeys needs it too (ring_step_keys.h; step_classes_test.cc finds most
// cases).
#ifndef RINGATTN_COMMON_SCHEDULE_RING_BACKWARD_H_
#define RINGATTN_COMMON_SCHEDULE_RING_BACKWARD_H_

#include <cstdint>
#include <vector>

#include "common/schedule/ring_rank.h"

namespace ringattn {

// The program steps of a pass.
class BackwardSteps {
 public:
  // `route` must outlive it.
  BackwardSteps(const KvRoute& route, int64_t first_step)
      : route_(route), first_step_(first_step) {}

  // Returns the step that computes on a part of the visit's block.
  int64_t Of(int visit, int part) const {
    if (visit == 0) return first_step_;  // before any part, while the first keys arrive
    return first_step_ + 1 + int64_t{visit - 1} * route_.parts + (route_.parts - 1 - part);
  }
  // Returns the step that computes on the rank's own block.
  int64_t own() const { return Of(route_.steps() - 1, 0) + (route_.steps() > 1 ? 1 : 0); }

 private:
  const KvRoute& route_;
  const int64_t first_step_;
};

// What becomes of the gradients of a rank's own block.
struct OwnBlockOrder {
  std::vector<RowRange> zeroed;  // rows at which no others' gradients arrive, so they start from 0
  // The rows that arrive last, as one range. Empty if the rank computes on others' blocks in the
  // meantime.
  RowRange last;
};
OwnBlockOrder OwnBlockOrderOf(const KvRoute& route, int rank);

// Returns the ranges of the own block on which the rank computes: all rows, or those before and
// after the rows that arrive last, and then these, which have a separate call.
//   last  OwnBlockOrder::last
std::vector<RowRange> OwnCallRanges(const AttentionSpec& spec, const KvRoute& route, int rank,
                                    const RowRange& last);

// Adds one pass to the rank's program, from `first_step` on.
// REQUIRES: the route uses PartRule::kPipeline, and the ring keeps its home blocks.
//   fetches  by visit: whether its keys must be fetched (RingPasses)
void AddRingBackward(RingRank& ring, const std::vector<char>& fetches, int64_t first_step,
                     const RingPart& part);

// Records the steps that some rank uses in the pass. REQUIRES: a ring of kNoRank.
void UseRingBackward(RingRank& ring, const std::vector<char>& fetches, int64_t first_step);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_RING_BACKWARD_H_
