// What operators see: requests by stage, and who was lost. The language: scenario.h.
#include "gtest/gtest.h"
#include "server/core/testing/scenario.h"

namespace ringattn::server {
namespace {

TEST(SnapshotTest, RequestsShowWhatTheyWaitFor) {
  EXPECT_SCENARIO(R"(
ring a b
requests 8
> no requests
running s1 tokens=10 world=2
> a b: run 1-1
accepted s2 tokens=20 world=1
> s2: accepted 1-2 on a
request s3 tokens=30 world=2
> a b: reserve 1-3 [0 1]
hold plans
request s4 tokens=40
> s4: plan for 1
wait 1s
requests 8
> 1 planning, 1 reserving, 1 uploading, 1 computing
> s1: computing, 10 tokens, 1s on a b
> s2: uploading, 20 tokens, 1s on a
> s3: reserving, 30 tokens, 1s
> s4: planning, 40 tokens, 1s
)");
}

TEST(SnapshotTest, ThoseThatHoldMemoryComeFirst) {
  EXPECT_SCENARIO(R"(
ring a
hold plans
request s1 tokens=10
> s1: plan for 1
request s2 tokens=20
> s2: plan for 1
planned s2
> a: reserve 1-1 [0]
requests 1
> 1 planning, 1 reserving
> s2: reserving, 20 tokens, 0
requests 0
> 1 planning, 1 reserving
)");
}

TEST(SnapshotTest, EachLossIsToldOnceWithItsReason) {
  EXPECT_SCENARIO(R"(
ring a b c
accepted s1 tokens=10 world=2
> s1: accepted 1-1 on a b
gone b
> s1: failed ABORTED WORKER_LOST retry: rank 1 (b) was lost: its control stream closed
> not serving
wait 300ms
> serving 2
silent c
wait 7s
> c: dropped: silent for 5.05s
> not serving
> serving 3
join d
gone d
losses
> d: disconnected, no rank of 3, ended 0: its control stream closed
> c: silent, rank 1 of 2, ended 0: silent for 5.05s
> b: disconnected, rank 1 of 1, ended 1: its control stream closed
)");
}

TEST(SnapshotTest, AWorkerThatItsPeersProveStuckCountsAsLostThoughItStays) {
  EXPECT_SCENARIO(R"(
ring a b
running s1 tokens=10 world=2
> a b: run 1-1
a at 1-1 1 5 waits
b at 1-1 1 4
wait 1s
a failed 1 timeout
wait 2s
> s1: failed ABORTED WORKER_LOST retry: rank 1 (b) was lost: stalled; first report from a at step 0: timeout
> not serving
> serving 2
losses
> b: stuck, rank 1 of 1, ended 1: stalled; first report from a at step 0: timeout
)");
}

TEST(SnapshotTest, OnlyTheLastLossesAreKept) {
  std::string script = "\nring a\n";
  for (int i = 0; i < 40; ++i) script += "join b\ngone b\n";
  script += "requests 4\n> no requests\nlosses\n";
  for (int i = 0; i < 32; ++i) {
    script += "> b: disconnected, no rank of 1, ended 0: its control stream closed\n";
  }
  script += "> told of 40\n";
  EXPECT_SCENARIO(script);
}

}  // namespace
}  // namespace ringattn::server
