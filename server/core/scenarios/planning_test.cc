// Plans are made elsewhere: what the core asks for, and what it does until they come. The
// language: scenario.h.
#include "gtest/gtest.h"
#include "server/core/testing/scenario.h"

namespace ringattn::server {
namespace {

TEST(PlanningTest, WhoeverHasAPlanGoesOn) {
  EXPECT_SCENARIO(R"(
ring a
hold plans
request heavy
> heavy: plan for 1
request light
> light: plan for 1
planned light
> a: reserve 1-1 [0]
planned heavy
> a: reserve 1-2 [0]
planned heavy            # once is enough
)");
}

TEST(PlanningTest, WhatEndsIsNotPlanned) {
  EXPECT_SCENARIO(R"(
ring a
hold plans
request s1
> s1: plan for 1
end s1
> s1: stop planning
> s1: failed CANCELLED CLIENT_CANCELLED
planned s1               # it was on its way
request s2
> s2: plan for 1
planned s2
> a: reserve 1-1 [0]
end s2                   # nothing to stop
> s2: failed CANCELLED CLIENT_CANCELLED
)");
}

TEST(PlanningTest, AnotherRingAnotherPlan) {
  EXPECT_SCENARIO(R"(
ring a b
hold plans
request s1 tokens=10 world=2
> s1: plan for 1
gone b
> s1: stop planning
> not serving
planned s1
wait 400ms
> s1: plan for 2
> serving 2
planned s1
> s1: failed UNAVAILABLE WORKERS_MISSING retry: plan.world_size: asks for 2 workers, 1 is ready; more are expected
)");
}

TEST(PlanningTest, WhatWasPlannedIsPlannedAnew) {
  EXPECT_SCENARIO(R"(
ring a
hold plans
request s1
> s1: plan for 1
planned s1
> a: reserve 1-1 [0]
gone a
> not serving
join b
wait 400ms
> s1: plan for 2
> serving 2
planned s1
> b: reserve 2-2 [0]
)");
}

TEST(PlanningTest, ThePlannerMayBeBusyOrLate) {
  EXPECT_SCENARIO(R"(
ring a
hold plans
request s1
> s1: plan for 1
unplanned s1 late
> s1: failed RESOURCE_EXHAUSTED PLANNING_TOO_LONG: planning takes longer: choose another layout, or fewer documents
request s2
> s2: plan for 1
unplanned s2 busy
> s2: failed RESOURCE_EXHAUSTED PLANNER_BUSY retry: too many wait
)");
}

}  // namespace
}  // namespace ringattn::server
