// Workers that are lost, and what becomes of requests. The language: scenario.h.
#include "gtest/gtest.h"
#include "server/core/testing/scenario.h"

namespace ringattn::server {
namespace {

TEST(LossTest, AClosedStreamEndsTheGeneration) {
  EXPECT_SCENARIO(R"(
ring a b c
accepted s1 tokens=10 world=3
> s1: accepted 1-1 on a b c
request s2 tokens=10 world=2
> a b: reserve 1-2 [0 1]
gone b
> s1: failed ABORTED WORKER_LOST retry: rank 1 (b) was lost: its control stream closed
> not serving
state s1
> s1: FAILED on a b c: WORKER_LOST
state s2
> s2: QUEUED
wait 300ms
> serving 2
> a c: reserve 2-3 [0 1]
)");
}

TEST(LossTest, TheReplacementJoinsTheNextGeneration) {
  EXPECT_SCENARIO(R"(
ring a b
gone b
> not serving
join b
wait 300ms
> serving 2
request s1 tokens=10 world=2
> a b: reserve 2-1 [0 1]
)");
}

TEST(LossTest, SilenceIsALoss) {
  EXPECT_SCENARIO(R"(
ring a b
accepted s1 tokens=10 world=2
> s1: accepted 1-1 on a b
silent a
wait 4s
wait 2s
> a: dropped: silent for 5.05s
> s1: failed ABORTED WORKER_LOST retry: rank 0 (a) was lost: silent for 5.05s
> not serving
> serving 2
wait 300ms
)");
}

TEST(LossTest, NoAnswerToReserveIsALoss) {
  EXPECT_SCENARIO(R"(
ring a b
request s1 tokens=10 world=2
> a b: reserve 1-1 [0 1]
b reserved 1-1
wait 9s
wait 2s
> a: dropped: it did not answer Reserve
> not serving
> serving 2
> s1: failed UNAVAILABLE WORKERS_MISSING retry: plan.world_size: asks for 2 workers, 1 is ready; more are expected
)");
}

TEST(LossTest, NoAnswerToReleaseIsALoss) {
  EXPECT_SCENARIO(R"(
ring a b
manual b
accepted s1 tokens=10 world=2
> s1: accepted 1-1 on a b
end s1
> s1: failed CANCELLED CLIENT_CANCELLED
> b: release 1-1
wait 9s
wait 2s
> b: dropped: it did not answer Release
> not serving
> serving 2
)");
}

TEST(LossTest, APauseOfTheCoordinatorIsNobodysFault) {
  EXPECT_SCENARIO(R"(
ring a b
accepted s1 tokens=10 world=2
> s1: accepted 1-1 on a b
pause 1m
wait 1s
a uploaded 1-1
)");
}

TEST(LossTest, TheLossOfAllLeavesNoRing) {
  EXPECT_SCENARIO(R"(
ring a b
request s1
> a: reserve 1-1 [0]
gone a
> not serving
gone b
request s2
> s2: failed UNAVAILABLE NO_RING retry: no ring of workers is formed
wait 1s
stats
> queued 1 active 0 memory free ready 0
)");
}

// The replay of what the loss aborted is not told that it asks for too much.
TEST(LossTest, AReplayWaitsForTheReplacement) {
  EXPECT_SCENARIO(R"(
ring a b
accepted s1 tokens=10 world=2
> s1: accepted 1-1 on a b
gone b
> s1: failed ABORTED WORKER_LOST retry: rank 1 (b) was lost: its control stream closed
> not serving
wait 300ms
> serving 2
request s2 id=s1 tokens=10 world=2
> s2: failed UNAVAILABLE WORKERS_MISSING retry: plan.world_size: asks for 2 workers, 1 is ready; more are expected
request s3 tokens=10 world=3
> s3: failed FAILED_PRECONDITION NOT_PLANNABLE field plan.world_size: plan.world_size: asks for 3 workers, 1 is ready
join b
wait 700ms
> not serving
> serving 3
request s4 id=s1 tokens=10 world=2
> a b: reserve 3-2 [0 1]
gone b
> not serving
wait 31s
> serving 4
> s4: failed UNAVAILABLE WORKERS_MISSING retry: plan.world_size: asks for 2 workers, 1 is ready; more are expected
request s5 id=s1 tokens=10 world=2
> s5: failed FAILED_PRECONDITION NOT_PLANNABLE field plan.world_size: plan.world_size: asks for 2 workers, 1 is ready
)");
}

// Those of a restarted coordinator neither.
TEST(LossTest, AReplayWaitsForTheOthersToComeBack) {
  CoordinatorConfig config = ScenarioConfig();
  config.assembly_time_max = absl::Seconds(5);
  const char* script = R"(
ring a
request s1 tokens=10 world=2
> s1: failed UNAVAILABLE WORKERS_MISSING retry: plan.world_size: asks for 2 workers, 1 is ready; more are expected
join b
wait 700ms
> not serving
> serving 2
request s2 id=s1 tokens=10 world=2
> a b: reserve 2-1 [0 1]
request s3 tokens=10 world=3
> s3: failed UNAVAILABLE WORKERS_MISSING retry: plan.world_size: asks for 3 workers, 2 are ready; more are expected
wait 4s
request s4 id=s3 tokens=10 world=3
> s4: failed FAILED_PRECONDITION NOT_PLANNABLE field plan.world_size: plan.world_size: asks for 3 workers, 2 are ready
)";
  EXPECT_EQ(RunScenario(script, config), script);
}

}  // namespace
}  // namespace ringattn::server
