// Standing still, being slow, and who is to blame. The language: scenario.h.
#include "gtest/gtest.h"
#include "server/core/testing/scenario.h"

namespace ringattn::server {
namespace {

TEST(ProgressTest, TheReporterIsNotToBlameButTheOneWhoseStreamCloses) {
  EXPECT_SCENARIO(R"(
ring a b c
running s1 tokens=10 world=3
> a b c: run 1-1
a failed 1 connection reset by rank 1
wait 100ms
c failed 1 connection reset by rank 0
gone b
> s1: failed ABORTED WORKER_LOST retry: rank 1 (b) was lost: its control stream closed
> not serving
)");
}

TEST(ProgressTest, TheSilentOneIsToBlame) {
  EXPECT_SCENARIO(R"(
ring a b c
running s1 tokens=10 world=3
> a b c: run 1-1
silent c
manual c
wait 500ms
a failed 1 transfer timed out
b failed 1 connection reset
wait 1450ms
wait 100ms
> s1: failed ABORTED WORKER_LOST retry: rank 2 (c) was lost: silent; first report from a at step 0: transfer timed out
> c: teardown 1
> not serving
wait 3.5s
> c: dropped: silent for 5.05s
> serving 2
wait 300ms
)");
}

// Rank 1 is stalled and waits for nobody; the others wait or report.
TEST(ProgressTest, TheOneThatStandsStillIsToBlame) {
  EXPECT_SCENARIO(R"(
ring a b c
running s1 tokens=10 world=3
> a b c: run 1-1
a at 1-1 1 20 waits
b at 1-1 2 30
c at 1-1 1 10 waits
wait 2s
a failed 1 transfer timed out
wait 1.5s
> s1: failed ABORTED WORKER_LOST retry: rank 1 (b) was lost: stalled; first report from a at step 0: transfer timed out
> not serving
)");
}

TEST(ProgressTest, NobodyIsToBlameForABrokenLink) {
  EXPECT_SCENARIO(R"(
ring a b
running s1 tokens=10 world=2
> a b: run 1-1
a at 1-1 1 20 waits
b at 1-1 1 10 waits
wait 2s
a failed 1 transfer timed out
request s2
wait 1.5s
> s1: failed ABORTED RING_ENDED retry: the ring ended: first report from a at step 0: transfer timed out
> not serving
wait 300ms
> serving 2
> a: reserve 2-2 [0]
)");
}

// A step may take more than a minute, three times as long as anybody may stand still.
TEST(ProgressTest, ASlowOneIsLeftAlone) {
  EXPECT_SCENARIO(R"(
ring a b
running s1 tokens=10 world=2
> a b: run 1-1
a at 1-1 0 1 waits
b at 1-1 0 1
wait 19s
b at 1-1 0 2
wait 19s
b at 1-1 0 3
wait 19s
b at 1-1 0 4
wait 19s
b at 1-1 1 4
wait 19s
a finished 1-1
wait 19s
b finished 1-1
> s1: download
)");
}

TEST(ProgressTest, TheLeastAdvancedThatWaitsForNobodyIsStuck) {
  EXPECT_SCENARIO(R"(
ring a b c
running s1 tokens=10 world=3
> a b c: run 1-1
a at 1-1 0 5 waits
b at 1-1 1 7
c at 1-1 1 6
wait 20s
wait 2s
> c: dropped: no progress for 20.05s in operation 1-1
> s1: failed ABORTED WORKER_LOST retry: rank 2 (c) was lost: no progress for 20.05s in operation 1-1
> not serving
> serving 2
wait 300ms
)");
}

TEST(ProgressTest, OneThatNeverStartedIsStuck) {
  EXPECT_SCENARIO(R"(
ring a b
running s1 tokens=10 world=2
> a b: run 1-1
a at 1-1 0 5 waits
wait 22s
> b: dropped: no progress for 20.05s in operation 1-1
> s1: failed ABORTED WORKER_LOST retry: rank 1 (b) was lost: no progress for 20.05s in operation 1-1
> not serving
> serving 2
)");
}

TEST(ProgressTest, AllWaitingForAnotherEndsTheRingAndDropsNobody) {
  EXPECT_SCENARIO(R"(
ring a b
running s1 tokens=10 world=2
> a b: run 1-1
a at 1-1 0 5 waits
b at 1-1 0 5 waits
wait 22s
> s1: failed ABORTED RING_ENDED retry: the ring ended: no progress for 20.05s in operation 1-1: every rank waits for another
> not serving
> serving 2
)");
}

TEST(ProgressTest, TheClockOfOneBehindAnotherStandsStill) {
  EXPECT_SCENARIO(R"(
ring a
accepted s1
> s1: accepted 1-1 on a
accepted s2
> s2: accepted 1-2 on a
a uploaded 1-1
> a: run 1-1
a uploaded 1-2
> a: run 1-2
a at 1-1 0 1
wait 15s
a at 1-1 0 2
wait 15s
a finished 1-1
> s1: download
a at 1-2 0 0
wait 19s
wait 2s
> a: dropped: no progress for 20.05s in operation 1-2
> s1: failed ABORTED WORKER_LOST retry: rank 0 (a) was lost: no progress for 20.05s in operation 1-2
> s2: failed ABORTED WORKER_LOST retry: rank 0 (a) was lost: no progress for 20.05s in operation 1-2
> not serving
)");
}

TEST(ProgressTest, ACancelledOneThatDoesNotStopIsStuck) {
  EXPECT_SCENARIO(R"(
ring a
running s1
> a: run 1-1
cancel s1
> s1: failed CANCELLED CANCELLED: cancelled by Cancel
> a: cancel 1-1
wait 19s
wait 2s
> a: dropped: no progress for 20.05s in operation 1-1
> not serving
)");
}

// c is behind, but it moves; b stands.
TEST(ProgressTest, TheOneThatMovesIsNotToBlame) {
  EXPECT_SCENARIO(R"(
ring a b c
running s1 tokens=10 world=3
> a b c: run 1-1
a at 1-1 2 20 waits
b at 1-1 2 30
c at 1-1 0 1
wait 2s
a failed 1 transfer timed out
c at 1-1 0 2
wait 1.5s
> s1: failed ABORTED WORKER_LOST retry: rank 1 (b) was lost: stalled; first report from a at step 0: transfer timed out
> not serving
)");
}

// Late bytes of the client are no progress of the workers.
TEST(ProgressTest, UploadsDoNotCountAsProgress) {
  EXPECT_SCENARIO(R"(
ring a
running s1
> a: run 1-1
wait 15s
upload s1
wait 6s
> a: dropped: no progress for 20.05s in operation 1-1
> s1: failed ABORTED WORKER_LOST retry: rank 0 (a) was lost: no progress for 20.05s in operation 1-1
> not serving
)");
}

// What another operation computes meanwhile proves nothing about this one.
TEST(ProgressTest, OnlyTheReportedOperationIsSearched) {
  EXPECT_SCENARIO(R"(
ring a b c
running s1 tokens=10 world=2
> a b: run 1-1
running s2 world=1
> c: run 1-2
a at 1-1 1 20 waits
b at 1-1 1 30
c at 1-2 0 1
wait 2s
a failed 1 transfer timed out
wait 1.5s
> s1: failed ABORTED WORKER_LOST retry: rank 1 (b) was lost: stalled; first report from a at step 0: transfer timed out
> s2: failed ABORTED WORKER_LOST retry: rank 1 (b) was lost: stalled; first report from a at step 0: transfer timed out
> not serving
)");
}

}  // namespace
}  // namespace ringattn::server
