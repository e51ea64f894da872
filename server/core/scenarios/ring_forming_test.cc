// Who is in the ring, and how it forms. The language: scenario.h.
#include "gtest/gtest.h"
#include "server/core/testing/scenario.h"

namespace ringattn::server {
namespace {

TEST(RingFormingTest, TwoPhasesInOrderOfNames) {
  EXPECT_SCENARIO(R"(
join b
join a
manual a b
wait 200ms
join c
manual c
wait 250ms    # c put the start off
wait 50ms
> a: prepare 1 rank 0 of 3
> b: prepare 1 rank 1 of 3
> c: prepare 1 rank 2 of 3
a prepared 1
a prepared 1  # twice is once
c prepared 1
a committed 1 # out of turn: nothing
b prepared 1
> a b c: commit 1 [a b c]
a committed 1
c committed 1
b committed 1
> serving 1
)");
}

TEST(RingFormingTest, AnotherVersionIsTurnedAway) {
  EXPECT_SCENARIO(R"(
join a version=2
> a: leave: version 2 does not match the coordinator's 1
> a: dropped: version 2 does not match the coordinator's 1
wait 1s
)");
}

TEST(RingFormingTest, SilenceInPhaseOneDropsTheSilentAndFormsWithTheOthers) {
  EXPECT_SCENARIO(R"(
join a
join b
manual a b
wait 300ms
> a: prepare 1 rank 0 of 2
> b: prepare 1 rank 1 of 2
a prepared 1
silent b
wait 4.5s
wait 1s
> b: dropped: silent for 5.05s
> a: teardown 1
a torndown 1
wait 600ms
> a: prepare 2 rank 0 of 1
)");
}

TEST(RingFormingTest, NoAnswerToPrepareDropsEvenAHeartbeatingWorker) {
  EXPECT_SCENARIO(R"(
join a
join b
manual b
wait 300ms
> b: prepare 1 rank 1 of 2
wait 9.9s
wait 200ms
> b: dropped: it did not answer Prepare
wait 1s
> serving 2
)");
}

TEST(RingFormingTest, NoAnswerToCommitLikewise) {
  EXPECT_SCENARIO(R"(
join a
join b
manual b
wait 300ms
> b: prepare 1 rank 1 of 2
b prepared 1
> b: commit 1 [ b]
wait 10s
> b: dropped: it did not answer Commit
wait 1s
> serving 2
)");
}

TEST(RingFormingTest, LossWhilePreparing) {
  EXPECT_SCENARIO(R"(
join a
join b
manual a b
wait 300ms
> a: prepare 1 rank 0 of 2
> b: prepare 1 rank 1 of 2
a prepared 1
gone b
> a: teardown 1
a torndown 1
wait 550ms
wait 100ms
> a: prepare 2 rank 0 of 1
a prepared 2
> a: commit 2 [a]
a committed 2
> serving 2
)");
}

TEST(RingFormingTest, AFailedFormingIsRetriedLaterAndLater) {
  EXPECT_SCENARIO(R"(
join a
join b
manual a
wait 300ms
> a: prepare 1 rank 0 of 2
a failed 1 connection refused
> a: teardown 1
a torndown 1
wait 550ms
wait 50ms
> a: prepare 2 rank 0 of 2
a failed 2 connection refused
> a: teardown 2
a torndown 2
wait 1150ms
wait 50ms
> a: prepare 3 rank 0 of 2
)");
}

TEST(RingFormingTest, ALateTornDownAndAStaleFailureAreIgnored) {
  EXPECT_SCENARIO(R"(
ring a b
manual a b
reform
> a b: teardown 1
> not serving
a torndown 1
b torndown 1
b torndown 1
wait 300ms
> a: prepare 2 rank 0 of 2
> b: prepare 2 rank 1 of 2
a failed 1 connection reset
a torndown 1
a prepared 2
b prepared 2
> a b: commit 2 [a b]
a committed 2
b committed 2
> reformed 2 OK
> serving 2
)");
}

TEST(RingFormingTest, NoAnswerToTeardownDropsTheWorker) {
  EXPECT_SCENARIO(R"(
ring a b c
manual a
reform
> a: teardown 1
> not serving
wait 3450ms
wait 50ms
> a: dropped: it did not answer Teardown
wait 300ms
> reformed 2 OK
> serving 2
)");
}

TEST(RingFormingTest, SameNameReplacesTheOldConnection) {
  EXPECT_SCENARIO(R"(
ring a b
accepted s1 tokens=10 world=2
> s1: accepted 1-1 on a b
join a
> a: dropped: its name joined again
> s1: failed ABORTED WORKER_LOST retry: rank 0 (a) was lost: its name joined again
> not serving
wait 300ms
> serving 2
)");
}

TEST(RingFormingTest, ANewcomerJoinsAnIdleRing) {
  EXPECT_SCENARIO(R"(
ring a b
manual a
join c
wait 250ms
wait 50ms
> a: teardown 1
> not serving
a torndown 1
wait 300ms
> a: prepare 2 rank 0 of 3
)");
}

TEST(RingFormingTest, ANewcomerWaitsForWhatRunsAndHoldsBackWhatCame) {
  EXPECT_SCENARIO(R"(
ring a
running s1
> a: run 1-1
join b
wait 300ms
request s2
wait 1s
stats
> queued 1 active 1 memory held ready 1
a finished 1-1
> s1: download
downloaded s1
> s1: finished
> not serving
wait 400ms
> serving 2
> a: reserve 2-2 [0]
a reserved 2-2
> s2: accepted 2-2 on a
)");
}

TEST(RingFormingTest, TheHoldForANewcomerIsBounded) {
  EXPECT_SCENARIO(R"(
ring a
running s1
> a: run 1-1
join b
wait 350ms
request s2
wait 9.9s
wait 200ms
> a: reserve 1-2 [0]
)");
}

TEST(RingFormingTest, WhoLeavesIsWaitedForAndLetGo) {
  EXPECT_SCENARIO(R"(
ring a b
running s1
> a: run 1-1
b leaving
request s2
wait 100ms
a finished 1-1
> s1: download
downloaded s1
> s1: finished
> not serving
wait 100ms
> b: leave: it asked to leave
wait 500ms
> serving 2
> a: reserve 2-2 [0]
)");
}

TEST(RingFormingTest, WhoLeavesAndIsNoMemberIsLetGoAtOnce) {
  EXPECT_SCENARIO(R"(
ring a
running s1
> a: run 1-1
join b
b leaving
> b: leave: it asked to leave
wait 1s
)");
}

TEST(RingFormingTest, AllMayLeave) {
  EXPECT_SCENARIO(R"(
ring a b
a leaving
> not serving
b leaving
> a b: leave: it asked to leave
wait 1s
)");
}

TEST(RingFormingTest, ReformOnRequest) {
  EXPECT_SCENARIO(R"(
reform
> reformed 0 UNAVAILABLE
ring a b
accepted s1 tokens=10 world=2
> s1: accepted 1-1 on a b
reform
> s1: failed ABORTED RING_ENDED retry: the ring ended: an operator asked for a new one
> not serving
wait 300ms
> reformed 2 OK
> serving 2
state s1
> s1: FAILED on a b: RING_ENDED
)");
}

TEST(RingFormingTest, ReformWhileFormingIsAnsweredWhenReady) {
  EXPECT_SCENARIO(R"(
join a
reform
reform
wait 300ms
> reformed 1 OK
> serving 1
)");
}

TEST(RingFormingTest, GenerationsStartAboveTheInitialOne) {
  EXPECT_SCENARIO(R"(
ring a
request s1
> a: reserve 1-1 [0]
)");
}

}  // namespace
}  // namespace ringattn::server
