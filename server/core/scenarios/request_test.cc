// A request's life while every worker is healthy. The language: scenario.h.
#include "gtest/gtest.h"
#include "server/core/testing/scenario.h"

namespace ringattn::server {
namespace {

TEST(RequestTest, FromJoinToFinish) {
  EXPECT_SCENARIO(R"(
join b
join a
manual a b
wait 300ms
> a: prepare 1 rank 0 of 2
> b: prepare 1 rank 1 of 2
a prepared 1
b prepared 1
> a b: commit 1 [a b]
a committed 1
b committed 1
> serving 1
request s1 tokens=100 world=2
> a b: reserve 1-1 [0 1]
a reserved 1-1
b reserved 1-1
> s1: accepted 1-1 on a b
a uploaded 1-1
b uploaded 1-1
> a b: run 1-1
b finished 1-1
a finished 1-1
> s1: download
downloaded s1
> s1: finished
> a b: release 1-1
a released 1-1
stats
> queued 0 active 0 memory held ready 2
b released 1-1
stats
> queued 0 active 0 memory free ready 2
state s1
> s1: SUCCEEDED on a b
)");
}

TEST(RequestTest, EmptyShardsMayBeUploadedBeforeAcceptance) {
  EXPECT_SCENARIO(R"(
ring a b
request s1 tokens=1 world=2
> a b: reserve 1-1 [0 1]
b reserved 1-1
b uploaded 1-1
a reserved 1-1
> s1: accepted 1-1 on a b
a uploaded 1-1
> a b: run 1-1
)");
}

TEST(RequestTest, LateDuplicateAndForeignMessagesChangeNothing) {
  EXPECT_SCENARIO(R"(
ring a b
request s1 world=1
> a: reserve 1-1 [0]
a finished 1-1
a uploaded 1-9
b reserved 1-1
a uploaded 0-1
a released 1-1
downloaded s1
upload s9
end s9
shard s9 0 broken
a reserved 1-1
> s1: accepted 1-1 on a
a reserved 1-1
shard s1 7 broken
shard s1 -1 broken
a uploaded 1-1
> a: run 1-1
a uploaded 1-1
a refused 1-1 out of memory
a finished 1-1
> s1: download
a broke 1-1 late
downloaded s1
> s1: finished
downloaded s1
a finished 1-1
a released 1-1
wait 3s
stats
> queued 0 active 0 memory free ready 2
)");
}

TEST(RequestTest, AComputeFailureAloneFailsAtOnce) {
  EXPECT_SCENARIO(R"(
ring a
running s1
> a: run 1-1
a broke 1-1 illegal instruction
> s1: failed INTERNAL COMPUTE_FAILED: rank 0 (a) failed: illegal instruction
state s1
> s1: FAILED on a: COMPUTE_FAILED
stats
> queued 0 active 0 memory free ready 1
)");
}

TEST(RequestTest, AComputeFailureInARingIsItsOwnFaultIfNobodyIsLost) {
  EXPECT_SCENARIO(R"(
ring a b
running s1 tokens=10 world=2
> a b: run 1-1
a broke 1-1 out of registers
b finished 1-1
wait 1450ms
wait 100ms
> s1: failed INTERNAL COMPUTE_FAILED: rank 0 (a) failed: out of registers
stats
> queued 0 active 0 memory free ready 2
)");
}

TEST(RequestTest, AComputeFailureThatALostWorkerExplains) {
  EXPECT_SCENARIO(R"(
ring a b
running s1 tokens=10 world=2
> a b: run 1-1
a broke 1-1 transfer failed
wait 500ms
gone b
> s1: failed ABORTED WORKER_LOST retry: rank 1 (b) was lost: its control stream closed
> not serving
)");
}

TEST(RequestTest, ABrokenShardStreamFailsItsRequestOnly) {
  EXPECT_SCENARIO(R"(
ring a b
accepted s1 world=1
> s1: accepted 1-1 on a
accepted s2 world=1
> s2: accepted 1-2 on b
shard s1 0 reset by peer
wait 1.5s
> s1: failed ABORTED SHARD_STREAM_BROKEN retry: the data stream to rank 0 (a) broke: reset by peer
b uploaded 1-2
> b: run 1-2
)");
}

TEST(RequestTest, DrainFinishesWhatItHas) {
  EXPECT_SCENARIO(R"(
ring a
request s1
> a: reserve 1-1 [0]
drain
> not serving
request s2
> s2: failed UNAVAILABLE DRAINING retry: the server is draining and takes no new requests
a reserved 1-1
> s1: accepted 1-1 on a
a uploaded 1-1
> a: run 1-1
a finished 1-1
> s1: download
downloaded s1
> s1: finished
> drained
drain
> drained
undrain
> serving 1
request s3
> a: reserve 1-2 [0]
)");
}

TEST(RequestTest, DrainOfAnIdleServer) {
  EXPECT_SCENARIO(R"(
drain
> drained
undrain
)");
}

}  // namespace
}  // namespace ringattn::server
