// The forward pass of a ring that passes K/V, rank r of W: at step s rank r computes on
// the block of kv_source_rank = (r - s) mod W while it passes that block on to r + 1 and
// receives the next from r - 1; two K/V slots alternate, the home shard's buffers being
// one of them. Only rows that some later rank can see travel at all; where windows or
// documents leave ranks without common keys, blocks go straight to the ranks that need
// them (direct, kv_route.h) instead of through all ranks between.
#ifndef RINGATTN_COMMON_SCHEDULE_RING_FORWARD_H_
#define RINGATTN_COMMON_SCHEDULE_RING_FORWARD_H_

#include <cstdint>

#include "common/schedule/ring_rank.h"

namespace ringattn {

// Adds one pass to the rank's program, from `first_step` on. Returns the steps it takes.
int64_t AddRingForward(RingRank& ring, int64_t first_step);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_RING_FORWARD_H_
