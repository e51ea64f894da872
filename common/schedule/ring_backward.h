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
#ifndef RINGATTN_COMMON_SCHEDULE_RING_BACKWARD_H_
#define RINGATTN_COMMON_SCHEDULE_RING_BACKWARD_H_

#include <cstdint>
#include <vector>

#include "common/schedule/ring_rank.h"

namespace ringattn {

// Adds one pass to the rank's program, from `first_step` on.
// REQUIRES: the route uses PartRule::kPipeline, and the ring keeps its home blocks.
//   fetches  by visit: whether its keys must be fetched (RingPasses)
void AddRingBackward(RingRank& ring, const std::vector<char>& fetches, int64_t first_step);

// Records the steps that some rank uses in the pass. REQUIRES: a ring of kNoRank.
void UseRingBackward(RingRank& ring, const std::vector<char>& fetches, int64_t first_step);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_RING_BACKWARD_H_
