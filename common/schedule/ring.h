// The ring schedules, flat and double: K/V travels around the ring (ring_visits.h, ring_forward.h,
// ring_backward.h).
#ifndef RINGATTN_COMMON_SCHEDULE_RING_H_
#define RINGATTN_COMMON_SCHEDULE_RING_H_

#include "common/program/program.h"
#include "common/schedule/kv_route.h"
#include "common/schedule/schedule_table.h"

namespace ringattn {

struct RingRoute {
  RingSpans pieces;
  KvRoute kv;

  bool direct() const { return kv.direct; }
};

RingRoute MakeRingRoute(const ScheduleContext& context);
Program MakeRingProgram(const ScheduleContext& context, const RingRoute& route, int rank);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_RING_H_
