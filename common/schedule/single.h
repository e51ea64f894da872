// The schedule of one rank, without exchange: a forward pass is one call, a backward pass one step.
#ifndef RINGATTN_COMMON_SCHEDULE_SINGLE_H_
#define RINGATTN_COMMON_SCHEDULE_SINGLE_H_

#include "common/program/program.h"
#include "common/schedule/schedule_table.h"

namespace ringattn {

// REQUIRES: the plan has one rank.
struct SingleRoute {
  bool direct() const { return false; }
};

inline SingleRoute MakeSingleRoute(const ScheduleContext&) { return {}; }
Program MakeSingleProgram(const ScheduleContext& context, const SingleRoute& route, int rank);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_SINGLE_H_
