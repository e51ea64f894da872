// The ring schedules, flat and double: K/V travels around the ring (ring_visits.h, ring_forward.h,
// ring_backward.h).
#ifndef RINGATTN_COMMON_SCHEDULE_RING_H_
#define RINGATTN_COMMON_SCHEDULE_RING_H_

#include <memory>

#include "common/program/program.h"
#include "common/schedule/block_slots.h"
#include "common/schedule/ring_rank.h"
#include "common/schedule/route/kv_route.h"
#include "common/schedule/schedule_table.h"

namespace ringattn {

// The part of the programs that all ranks share.
struct RingRoute {
  RingSpans pieces;
  std::unique_ptr<const KvRoute> kv;  // `slots` refers to it
  BlockSlots slots;
  RingPasses passes;

  bool direct() const { return kv->direct; }
};

RingRoute MakeRingRoute(const ScheduleContext& context);
Program MakeRingProgram(const ScheduleContext& context, const RingRoute& route, int rank);

// Returns the part that is the whole program.
RingPart WholeProgram(const RingRoute& route);

// Returns a part of a rank's program.
//   counted  the work of all ranks, or null
Program MakeRingPart(const ScheduleContext& context, const RingRoute& route, int rank,
                     const RingPart& part, const RingWork* counted);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_RING_H_
