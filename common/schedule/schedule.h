// Schedule: one Program per rank (program.h). Together they compute one request. One executor runs
// every program; the schedules differ only in the programs that they build (schedule_table.h).
#ifndef RINGATTN_COMMON_SCHEDULE_SCHEDULE_H_
#define RINGATTN_COMMON_SCHEDULE_SCHEDULE_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/attention/attention_spec.h"
#include "common/layout/shard_plan.h"
#include "common/program/program.h"
#include "common/schedule/program_recipe.h"
#include "common/schedule/schedule_kind.h"
#include "common/schedule/step_classes.h"

namespace ringattn {

struct Schedule {
  ProgramRecipe recipe;
  // Blocks of keys or of queries go directly from their owner to the ranks that need them.
  bool direct = false;
  std::vector<Program> programs;  // one per rank
};

// Builds the programs of one request, one rank at a time. One program costs about 1/world_size of
// all programs. Pure. Not thread safe.
class ScheduleBuilder {
 public:
  // Returns whether to cancel. After it returns true, building ends early and its results are
  // invalid. Empty: never.
  using Cancelled = std::function<bool()>;

  // `spec` and `plan` must outlive the builder. `cancelled` is polled on the caller's thread before
  // each pass over the pieces of two ranks' shards. A dilated problem is built from its parts
  // (dilated.h), with the recipe's schedule for each part.
  // REQUIRES: `plan` has the recipe's layout and stripe, and shards bias and mask as the schedule
  // requires (PairAxisOf) or has one rank. kSingle only with one rank. recompute_forward only
  // backward. heads_per_step is 0, or a divisor of num_kv_heads with kAllGather, no gradient of a
  // bias that heads share, and no dilation. group_size divides plan.world_size with kDoubleRing,
  // and is 0 otherwise.
  ScheduleBuilder(const AttentionSpec& spec, const ShardPlan& plan, const ProgramRecipe& recipe,
                  Cancelled cancelled = {});
  ~ScheduleBuilder();
  ScheduleBuilder(const ScheduleBuilder&) = delete;
  ScheduleBuilder& operator=(const ScheduleBuilder&) = delete;

  // The groups of a double ring count as hosts until AssignLanes gets the real ones.
  Program MakeProgram(int rank);

  // Returns the classes of the programs' steps, from which costs of all ranks follow without all
  // programs; null if this schedule has none. Borrows the builder, its arguments and host_of_rank.
  //   host_of_rank  as for LaneBetween
  std::unique_ptr<const ClassedPrograms> FindStepClasses(const std::vector<int>& host_of_rank);

  bool direct() const;     // Schedule::direct
  bool cancelled() const;  // whether `cancelled` has returned true

 private:
  struct Shared;  // the part that all ranks share

  std::vector<int> GroupOfEachRank() const;

  const AttentionSpec& spec_;
  const ShardPlan& plan_;
  const ProgramRecipe recipe_;
  std::unique_ptr<Shared> shared_;
};

// Returns the program of one rank. REQUIRES: as ScheduleBuilder.
Program MakeProgram(const AttentionSpec& spec, const ShardPlan& plan, const ProgramRecipe& recipe,
                    int rank);

// Returns the programs of all ranks. REQUIRES: as ScheduleBuilder.
Schedule MakeSchedule(const AttentionSpec& spec, const ShardPlan& plan,
                      const ProgramRecipe& recipe);

// Returns a table: buffers, then per rank and step the transfers with peers and bytes and the calls
// with tiles, then totals.
std::string ToString(const Schedule& schedule, const AttentionSpec& spec);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_SCHEDULE_H_
