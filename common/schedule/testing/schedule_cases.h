// Problems for tests of schedules.
#ifndef RINGATTN_COMMON_SCHEDULE_TESTING_SCHEDULE_CASES_H_
#define RINGATTN_COMMON_SCHEDULE_TESTING_SCHEDULE_CASES_H_

#include <cstdint>
#include <random>
#include <string>

#include "common/schedule/schedule.h"

namespace ringattn {

// One batch row, one head of one bf16 each; no mask.
AttentionSpec DenseSpec(int64_t sq, int64_t sk);

struct ScheduleCase {
  AttentionSpec spec;
  ShardPlan plan;
  ProgramRecipe recipe;

  Schedule Make() const { return MakeSchedule(spec, plan, recipe); }
  Program MakeProgram(int rank, bool keeps_inputs = false) const {
    ProgramRecipe kept = recipe;
    kept.keeps_inputs = keeps_inputs;
    return ringattn::MakeProgram(spec, plan, kept, rank);
  }
};

// Draws a case with every option, schedule, layout and direction, ring sizes 1 to 8, and axes up to
// `longest`.
ScheduleCase DrawScheduleCase(std::mt19937& random, int64_t longest);

std::string Describe(const ScheduleCase& c, const Schedule& schedule);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_TESTING_SCHEDULE_CASES_H_
