// The queue, the planner and the workers' memory. The language: scenario.h.
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"
#include "server/core/testing/scenario.h"

namespace ringattn::server {
namespace {

TEST(AdmissionTest, NoWorkerNoRing) {
  EXPECT_SCENARIO(R"(
request s1
> s1: failed UNAVAILABLE NO_RING retry: no ring of workers is formed
)");
}

TEST(AdmissionTest, QueuedWhileFormingAndNotForEver) {
  EXPECT_SCENARIO(R"(
join a
manual a
request s1
wait 10.5s
> a: prepare 1 rank 0 of 1
> a: dropped: it did not answer Prepare
request s2    # the only worker was dropped: nothing forms
> s2: failed UNAVAILABLE NO_RING retry: no ring of workers is formed
wait 20s
> s1: failed UNAVAILABLE NO_RING retry: no ring of workers is formed
)");
}

TEST(AdmissionTest, MoreWorkersThanAreReady) {
  EXPECT_SCENARIO(R"(
ring a b
request s1 tokens=10 world=3
> s1: failed FAILED_PRECONDITION NOT_PLANNABLE field plan.world_size: plan.world_size: asks for 3 workers, 2 are ready
request s2 tokens=10 world=2
> a b: reserve 1-1 [0 1]
request s3 tokens=10 world=4   # at once, not behind s2
> s3: failed FAILED_PRECONDITION NOT_PLANNABLE field plan.world_size: plan.world_size: asks for 4 workers, 2 are ready
)");
}

TEST(AdmissionTest, SingleDeviceRequestsSpreadOverTheIdlest) {
  EXPECT_SCENARIO(R"(
ring a b c
accepted s1
> s1: accepted 1-1 on a
accepted s2
> s2: accepted 1-2 on b
accepted s3
> s3: accepted 1-3 on c
b uploaded 1-2
> b: run 1-2
b finished 1-2
> s2: download
downloaded s2
> s2: finished
accepted s4
> s4: accepted 1-4 on b
request s5 tokens=10 world=2
> a b: reserve 1-5 [0 1]
)");
}

// What waits asks for memory at once; nobody waits for another's answers.
TEST(AdmissionTest, ManyReserveAtATime) {
  EXPECT_SCENARIO(R"(
ring a b
request s1 tokens=10 world=2
> a b: reserve 1-1 [0 1]
request s2
> a: reserve 1-2 [0]
request s3
> b: reserve 1-3 [1]
b reserved 1-3
> s3: accepted 1-3 on b
a reserved 1-1
b reserved 1-1
> s1: accepted 1-1 on a b
a reserved 1-2
> s2: accepted 1-2 on a
)");
}

// Each has what the other lacks. Neither is refused for good: they ask one after the other.
TEST(AdmissionTest, ThoseInEachOthersWayReserveAlone) {
  EXPECT_SCENARIO(R"(
ring a b
manual a
request s1 tokens=10 world=2
> a b: reserve 1-1 [0 1]
request s2 tokens=10 world=2
> a b: reserve 1-2 [0 1]
a reserved 1-1
b reserved 1-2
b refused 1-1 no memory
> a: release 1-1
a refused 1-2 no memory
a released 1-1
> a b: reserve 1-3 [0 1]
request s3               # nobody asks while s1 does
a reserved 1-3
b reserved 1-3
> s1: accepted 1-3 on a b
> a b: reserve 1-4 [0 1]
a reserved 1-4
b refused 1-4 no memory
> a: release 1-4
a released 1-4
stats
> queued 2 active 1 memory held ready 2
end s1
> s1: failed CANCELLED CLIENT_CANCELLED
> a: release 1-3
a released 1-3
> a b: reserve 1-5 [0 1]
a reserved 1-5
b reserved 1-5
> s2: accepted 1-5 on a b
> a: reserve 1-6 [0]
)");
}

// 64 of them, 16 for each of four workers: as many round trips as one needs.
TEST(AdmissionTest, SixtyFourAreAdmittedInOneRoundTrip) {
  CoordinatorConfig config = ScenarioConfig();
  config.max_operations_per_worker = 32;
  std::string script = "ring a b c d\nhold plans\n";
  for (int i = 1; i <= 64; ++i) absl::StrAppend(&script, "request s", i, "\n");
  for (int i = 1; i <= 64; ++i) absl::StrAppend(&script, "planned s", i, "\n");
  const std::string before_any_answer = RunScenario(script, config);
  int reserves = 0;
  for (absl::string_view line : absl::StrSplit(before_any_answer, '\n')) {
    reserves += absl::StrContains(line, ": reserve ");
  }
  EXPECT_EQ(reserves, 64) << before_any_answer;
}

// c's work alone must not keep the ring's transfers waiting; what comes behind the
// ring does not pass it; those that share nothing run side by side.
TEST(AdmissionTest, ARingRunsOnceItsMembersAreFree) {
  EXPECT_SCENARIO(R"(
ring a b c
running s1 world=1
> a: run 1-1
accepted s2 tokens=10 world=3
> s2: accepted 1-2 on a b c
a uploaded 1-2
b uploaded 1-2
c uploaded 1-2
accepted s3 world=1
> s3: accepted 1-3 on b
b uploaded 1-3
state s2
> s2: UPLOADING on a b c
a finished 1-1
> s1: download
> a b c: run 1-2
> b: run 1-3
accepted s4 tokens=10 world=3
> s4: accepted 1-4 on a b c
a uploaded 1-4
b uploaded 1-4
c uploaded 1-4
b finished 1-2
a finished 1-2
c finished 1-2
> s2: download
cancel s4
> s4: failed CANCELLED CANCELLED: cancelled by Cancel
b finished 1-3
> s3: download
)");
}

// s2 uploads first, so it runs first everywhere.
TEST(AdmissionTest, RunsInOneOrderOnAllMembers) {
  EXPECT_SCENARIO(R"(
ring a b
accepted s1 tokens=10 world=2
> s1: accepted 1-1 on a b
accepted s2 tokens=10 world=2
> s2: accepted 1-2 on a b
a uploaded 1-1
a uploaded 1-2
b uploaded 1-2
> a b: run 1-2
b uploaded 1-1
> a b: run 1-1
)");
}

TEST(AdmissionTest, ARefusalGivesTheOthersBackAndWaitsForARelease) {
  EXPECT_SCENARIO(R"(
ring a b
accepted s1 world=1
> s1: accepted 1-1 on a
request s2 tokens=10 world=2
> a b: reserve 1-2 [0 1]
b reserved 1-2
manual b
a refused 1-2 no memory
> b: release 1-2
memory                 # a refused part holds nothing, the others until they have released
> a 160, b 140
b released 1-2
memory
> a 160, b 0
request s3 world=1     # not past s2
wait 5s
stats
> queued 2 active 1 memory held ready 2
a uploaded 1-1
> a: run 1-1
a finished 1-1
> s1: download
downloaded s1
> s1: finished
> a b: reserve 1-3 [0 1]
> a: reserve 1-4 [0]
a reserved 1-3
b reserved 1-3
> s2: accepted 1-3 on a b
)");
}

TEST(AdmissionTest, ARefusalByAnEmptyWorkerIsFinal) {
  EXPECT_SCENARIO(R"(
ring a b
request s1 tokens=10 world=2
> a b: reserve 1-1 [0 1]
a reserved 1-1
b refused 1-1 cannot allocate
> s1: failed RESOURCE_EXHAUSTED WORKER_MEMORY retry: rank 1 (b) could not set aside 140 bytes: cannot allocate
stats
> queued 0 active 0 memory free ready 2
request s2
> a: reserve 1-2 [0]
)");
}

// No memory would help: neither is it waited for what others hold, nor is it tried again.
TEST(AdmissionTest, AReserveThatAWorkerCannotReadIsAFaultOfOurs) {
  EXPECT_SCENARIO(R"(
ring a b
accepted s1 world=2
> s1: accepted 1-1 on a b
request s2 tokens=10 world=2
> a b: reserve 1-2 [0 1]
a reserved 1-2
b baffled 1-2 malformed Reserve: layout: makes no sense
> s2: failed INTERNAL RESERVE_MALFORMED: rank 1 (b) cannot make sense of what it was asked for: malformed Reserve: layout: makes no sense
stats
> queued 0 active 1 memory held ready 2
end s1
> s1: failed CANCELLED CLIENT_CANCELLED
memory
> a 0, b 0
stats
> queued 0 active 0 memory free ready 2
)");
}

TEST(AdmissionTest, WhatNeverFitsIsToldSo) {
  EXPECT_SCENARIO(R"(
join a memory=100
join b memory=200
wait 300ms
> serving 1
request s1 tokens=1000 world=2
> s1: failed RESOURCE_EXHAUSTED WORKER_MEMORY: rank 1 (b) would need 14000 bytes and has 200 in all
request s2 tokens=1
> a: reserve 1-1 [0]
)");
}

// 200 bytes of buffers: the plan knows nothing of what a GPU's kernels need beside them.
TEST(AdmissionTest, AWorkspaceThatNeverFitsIsToldBeforeTheUpload) {
  EXPECT_SCENARIO(R"(
join a memory=1000
wait 300ms
> serving 1
request s1 tokens=10
> a: reserve 1-1 [0]
a refused 1-1 workspace=801 no memory
> s1: failed RESOURCE_EXHAUSTED WORKER_MEMORY: rank 0 (a) would need 1001 bytes (buffers of 200 and a kernel workspace of 801) and has 1000 in all
memory
> a 0
accepted s2 tokens=10
> s2: accepted 1-2 on a
request s3 tokens=10     # at once, though s2 will give memory back
> a: reserve 1-3 [0]
a refused 1-3 workspace=801 no memory
> s3: failed RESOURCE_EXHAUSTED WORKER_MEMORY: rank 0 (a) would need 1001 bytes (buffers of 200 and a kernel workspace of 801) and has 1000 in all
)");
}

TEST(AdmissionTest, AWorkspaceThatFitsLaterIsWaitedFor) {
  EXPECT_SCENARIO(R"(
join a memory=1000
wait 300ms
> serving 1
accepted s1 tokens=20
> s1: accepted 1-1 on a
request s2 tokens=10
> a: reserve 1-2 [0]
a refused 1-2 workspace=700 no memory
stats
> queued 1 active 1 memory held ready 1
request s3 tokens=1      # not past s2
end s1
> s1: failed CANCELLED CLIENT_CANCELLED
> a: reserve 1-3 [0]
> a: reserve 1-4 [0]
memory
> a 920
a reserved 1-3
> s2: accepted 1-3 on a
)");
}

// Each member's own: b's is not a's, which has less memory.
TEST(AdmissionTest, EveryMembersWorkspaceIsLearnt) {
  EXPECT_SCENARIO(R"(
join a memory=250
join b memory=1000
wait 300ms
> serving 1
request s1 tokens=10 world=2
> a b: reserve 1-1 [0 1]
b refused 1-1 workspace=700 no memory
> a b: reserve 1-2 [0 1]
a refused 1-2 workspace=50 no memory
> a b: reserve 1-3 [0 1]
memory
> a 190, b 840
a reserved 1-3
b reserved 1-3
> s1: accepted 1-3 on a b
)");
}

TEST(AdmissionTest, AWorkspaceMayFitOnAnotherWorker) {
  EXPECT_SCENARIO(R"(
join a memory=500
join b memory=1000
wait 300ms
> serving 1
request s1 tokens=10
> a: reserve 1-1 [0]
a refused 1-1 workspace=700 no memory
> b: reserve 1-2 [1]
b reserved 1-2
> s1: accepted 1-2 on b
)");
}

TEST(AdmissionTest, ARefusalWithoutNewsIsFinal) {
  EXPECT_SCENARIO(R"(
join a memory=1000
join b memory=1000
wait 300ms
> serving 1
request s1 tokens=10 world=2
> a b: reserve 1-1 [0 1]
a reserved 1-1
b refused 1-1 workspace=100 cannot allocate
> a b: reserve 1-2 [0 1]
memory
> a 140, b 240
a reserved 1-2
b refused 1-2 workspace=100 cannot allocate
> s1: failed RESOURCE_EXHAUSTED WORKER_MEMORY retry: rank 1 (b) could not set aside 240 bytes: workspace=100 cannot allocate
)");
}

// 20 bytes a token: q, k, v, out and lse of one head, one column, fp32.
TEST(AdmissionTest, WaitsForMemoryThatOthersHold) {
  EXPECT_SCENARIO(R"(
join a memory=50000
wait 300ms
> serving 1
accepted s1 tokens=1000
> s1: accepted 1-1 on a
accepted s2 tokens=1000
> s2: accepted 1-2 on a
request s3 tokens=1000
request s4 tokens=1      # would fit, but s3 was first
stats
> queued 2 active 2 memory held ready 1
end s2
> s2: failed CANCELLED CLIENT_CANCELLED
> a: reserve 1-3 [0]
> a: reserve 1-4 [0]
a reserved 1-3
> s3: accepted 1-3 on a
a reserved 1-4
> s4: accepted 1-4 on a
)");
}

// No heartbeat comes in between: what the topology says is the coordinator's own account.
TEST(AdmissionTest, TheTopologySaysAtOnceWhatIsReserved) {
  EXPECT_SCENARIO(R"(
ring a b
memory
> a 0, b 0
request s1 tokens=1000 world=1
> a: reserve 1-1 [0]
memory
> a 20000, b 0
a reserved 1-1
> s1: accepted 1-1 on a
accepted s2 tokens=1000 world=1
> s2: accepted 1-2 on b
memory
> a 20000, b 20000
end s2
> s2: failed CANCELLED CLIENT_CANCELLED
memory
> a 20000, b 0
manual a
end s1
> s1: failed CANCELLED CLIENT_CANCELLED
> a: release 1-1
memory
> a 20000, b 0
a released 1-1
memory
> a 0, b 0
)");
}

TEST(AdmissionTest, ALostRingHoldsNothing) {
  EXPECT_SCENARIO(R"(
ring a b
running s1 tokens=1000 world=1
> a: run 1-1
gone b
> s1: failed ABORTED WORKER_LOST retry: rank 1 (b) was lost: its control stream closed
> not serving
memory
> a 0
)");
}

// Six common places and, while nothing computes, an express one for each of two clients.
TEST(AdmissionTest, AtMostEightPerWorker) {
  EXPECT_SCENARIO(R"(
ring a
accepted s1 client=x
> s1: accepted 1-1 on a
accepted s2 client=x
> s2: accepted 1-2 on a
accepted s3 client=x
> s3: accepted 1-3 on a
accepted s4 client=x
> s4: accepted 1-4 on a
accepted s5 client=x
> s5: accepted 1-5 on a
accepted s6 client=x
> s6: accepted 1-6 on a
request s7 client=x      # the others are for those who have none
request s8 client=x
accepted s9 client=y
> s9: accepted 1-7 on a
accepted s10 client=z
> s10: accepted 1-8 on a
request s11 client=w
end s4
> s4: failed CANCELLED CLIENT_CANCELLED
> a: reserve 1-9 [0]
a reserved 1-9
> s11: accepted 1-9 on a
end s9                   # an express place
> s9: failed CANCELLED CLIENT_CANCELLED
end s5
> s5: failed CANCELLED CLIENT_CANCELLED
> a: reserve 1-10 [0]
a reserved 1-10
> s7: accepted 1-10 on a
)");
}

// One document of 2,048 segments, which the plan has as documents of their own.
TEST(AdmissionTest, SegmentsOfADilatedLevelTakeNoExpressPlace) {
  EXPECT_SCENARIO(R"(
join a options=dilation_levels
wait 300ms
> serving 1
accepted s1 client=x
> s1: accepted 1-1 on a
accepted s2 client=x
> s2: accepted 1-2 on a
accepted s3 client=x
> s3: accepted 1-3 on a
accepted s4 client=x
> s4: accepted 1-4 on a
accepted s5 client=x
> s5: accepted 1-5 on a
accepted s6 client=x
> s6: accepted 1-6 on a
request long client=y tokens=8192 segment_length=4
accepted short client=y tokens=8192 segment_length=8192
> short: accepted 1-7 on a
end s4
> s4: failed CANCELLED CLIENT_CANCELLED
> a: reserve 1-8 [0]
a reserved 1-8
> long: accepted 1-8 on a
)");
}

}  // namespace
}  // namespace ringattn::server
