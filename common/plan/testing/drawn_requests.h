// Requests to the planner for tests: every option, schedule, layout and direction, on workers of
// one host or of several.
// Tests: recorded_plans_test.cc, step_classes_test.cc
#ifndef RINGATTN_COMMON_PLAN_TESTING_DRAWN_REQUESTS_H_
#define RINGATTN_COMMON_PLAN_TESTING_DRAWN_REQUESTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "common/attention/attention_spec.h"
#include "common/plan/planner.h"

namespace ringattn {

struct DrawnRequest {
  AttentionSpec spec;
  Direction direction = Direction::kForward;
  PlanChoice forced;  // layout, schedule and ring size
  PlanChoice free;    // the planner chooses all of these
  PlannerInputs inputs;
};

// Returns the request of a number; equal on every machine. Rings have up to 16 workers.
DrawnRequest DrawRequest(int number);

// Returns the request of a number whose forced choice is a ring, mostly a double one. Rings have up
// to 32 workers, and their steps have classes (common/schedule/step_classes.h).
DrawnRequest DrawRing(int number);

// Returns the figures of a plan, one line: schedule, layout, ring size, steps, bytes exchanged,
// sums and maxima over the ranks of buffer bytes, of tiles and of bytes sent, a hash of these by
// rank, and the predicted figures with all digits.
std::string FiguresOf(const Plan& plan);

// The requests whose plans are in recorded_plans.txt: two lines each, for the forced choice and for
// the free one.
inline constexpr int kRecordedRequests = 150;
// Returns these two lines; "error" instead of a plan's figures if planning fails.
std::vector<std::string> FiguresOfRequest(int number);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PLAN_TESTING_DRAWN_REQUESTS_H_
