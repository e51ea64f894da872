// The table of schedules. A schedule consists of two functions: `make_route` computes the part that
// all ranks share, and `make_program` builds one rank's program from it. A new schedule is a file
// with these two functions and a row in schedule_table.cc. With a third, `find_classes`, planning
// does not need all programs.
#ifndef RINGATTN_COMMON_SCHEDULE_SCHEDULE_TABLE_H_
#define RINGATTN_COMMON_SCHEDULE_SCHEDULE_TABLE_H_

#include <memory>
#include <vector>

#include "common/attention/attention_spec.h"
#include "common/layout/shard_plan.h"
#include "common/program/program.h"
#include "common/schedule/program_recipe.h"
#include "common/schedule/route/cancel_latch.h"
#include "common/schedule/step_classes.h"

namespace ringattn {

// The inputs of both functions. Borrowed: all must outlive the route.
struct ScheduleContext {
  const AttentionSpec& spec;
  const ShardPlan& plan;
  const ProgramRecipe& recipe;
  CancelLatch* latch;
};

// A route of any schedule.
class ScheduleRoute {
 public:
  virtual ~ScheduleRoute() = default;
  virtual bool direct() const = 0;  // Schedule::direct
};

struct ScheduleEntry {
  const char* name;
  std::unique_ptr<const ScheduleRoute> (*make_route)(const ScheduleContext& context);
  // REQUIRES: `route` was made by this entry's make_route from the same context.
  Program (*make_program)(const ScheduleContext& context, const ScheduleRoute& route, int rank);
  // Returns the classes of the programs' steps; null if the programs have none. May be null. The
  // context's values and the route outlive them.
  std::unique_ptr<const ClassedPrograms> (*find_classes)(
      const ScheduleContext& context, const ScheduleRoute& route,
      const std::vector<int>& host_of_rank) = nullptr;
};

// Returns the row of `kind`; null if the number is not a kind.
const ScheduleEntry* FindSchedule(ScheduleKind kind);
// Dilated attention runs the programs of its parts, with any kind of schedule.
const ScheduleEntry& DilatedSchedule();

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_SCHEDULE_TABLE_H_
