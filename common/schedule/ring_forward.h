// The forward pass of a ring that passes K/V. At step s, rank r of W computes on the block of
// kv_source_rank = (r - s) mod W while it sends that block to r + 1 and receives the next from r -
// 1. Two K/V slots alternate; the home shard's buffers are one of them. Only rows that some later
// rank sees travel. If windows or documents leave ranks without common keys, blocks go directly to
// the ranks that need them (`direct`, kv_route.h) instead of through all ranks between. If what a
// rank does in a step begins to depend on something else, RingStepKeys needs it too
// (ring_step_keys.h).
#ifndef RINGATTN_COMMON_SCHEDULE_RING_FORWARD_H_
#define RINGATTN_COMMON_SCHEDULE_RING_FORWARD_H_

#include <cstdint>

#include "common/schedule/ring_rank.h"

namespace ringattn {

// Adds one pass to the rank's program, from `first_step` on. Returns the number of its steps.
int64_t AddRingForward(RingRank& ring, int64_t first_step, const RingPart& part);

// Records the steps that some rank uses in the pass. REQUIRES: a ring of kNoRank.
void UseRingForward(RingRank& ring, int64_t first_step);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_RING_FORWARD_H_
