// The backward pass of a ring that passes K/V. What others contribute to a block's dk, dv
// travels in fp32 with the block, in parts, so that one part travels while the next
// computes. A part's accumulator starts at the first rank that contributes and goes
// straight home from the last one; the owner computes its own block last, on top of what
// has come home. dq stays. Additions have one order, fixed by the schedule, so results do
// not depend on timing.
//
// Of block k > 0 the last part comes first: part p computes at
// 1 + (k - 1) * parts + (parts - 1 - p). Its keys come `parts` steps earlier, its
// accumulator leaves one step later, while the next part computes.
// Last first, because under a causal mask, zigzag, some ranks see the whole block and some
// only its first part, for which they take as long as the others for both. So whatever
// leaves at a step is complete at the same time on all ranks, and ranks that are the first
// to see a last part compute it while the first part's accumulator is still on its way.
// The rank's own block comes at the very end: what others have contributed lands in its
// accumulators meanwhile, and nothing is left to wait for when it is done.
#ifndef RINGATTN_COMMON_SCHEDULE_RING_BACKWARD_H_
#define RINGATTN_COMMON_SCHEDULE_RING_BACKWARD_H_

#include <cstdint>

#include "common/schedule/ring_rank.h"

namespace ringattn {

// Adds one pass to the rank's program, from `first_step` on.
// REQUIRES: the route was cut by PartRule::kPipeline, and the ring keeps its home blocks.
void AddRingBackward(RingRank& ring, int64_t first_step);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_RING_BACKWARD_H_
