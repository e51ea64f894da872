// Requests whose members copy the tensors themselves. The language: scenario.h.
#include "gtest/gtest.h"
#include "server/core/testing/scenario.h"

namespace ringattn::server {
namespace {

TEST(HostMemoryTest, ItEndsWhenEveryMemberHasDelivered) {
  EXPECT_SCENARIO(R"(
ring a b
share r a b
request s1 tokens=10 world=2 region=r
> a b: reserve 1-1 [0 1]
a reserved 1-1
a uploaded 1-1
b reserved 1-1
> s1: accepted 1-1 on a b (host memory: all members have the regions of all tensors)
b uploaded 1-1
> a b: run 1-1
a finished 1-1
a delivered 1-1
b delivered 1-1
b finished 1-1
> s1: download
> s1: finished
b delivered 1-1
)");
}

TEST(HostMemoryTest, WithoutTheRegionAtAllMembersTheCoordinatorServes) {
  EXPECT_SCENARIO(R"(
ring a b
share r a
accepted s1 tokens=10 world=2 region=r
> s1: accepted 1-1 on a b (no host memory: b has not attached the region of q)
request s2 tokens=10 world=2 region=r required=1
> s2: failed FAILED_PRECONDITION TRANSPORT_UNAVAILABLE field transport.required: transport.required: no host memory: b has not attached the region of q
share r b
accepted s3 tokens=10 world=2 region=r
> s3: accepted 1-2 on a b (host memory: all members have the regions of all tensors)
unshare r a
accepted s4 tokens=10 world=2 region=r
> s4: accepted 1-3 on a b (no host memory: a has not attached the region of q)
)");
}

TEST(HostMemoryTest, AnUnknownRegionIsRefusedAtOnce) {
  EXPECT_SCENARIO(R"(
ring a
request s1 region=r
> s1: failed INVALID_ARGUMENT REGION_UNKNOWN field transport.places[0].region_id: transport.places[0].region_id: names no region of this client; attach it (again) first
)");
}

// Then nobody writes into its memory any more.
TEST(HostMemoryTest, TheClientLearnsOfAnEndWhenNobodyCopiesAnyMore) {
  EXPECT_SCENARIO(R"(
ring a b
manual a b
share r a b
running s1 tokens=10 world=2 region=r
> a b: run 1-1
end s1
> a b: cancel 1-1
a cancelled 1-1
b finished 1-1
> a b: release 1-1
state s1
> s1: FAILED on a b: CLIENT_CANCELLED
a released 1-1
b released 1-1
> s1: failed CANCELLED CLIENT_CANCELLED
)");
}

TEST(HostMemoryTest, WithALostWorkerItLearnsWhenTheSurvivorsHaveLetGo) {
  EXPECT_SCENARIO(R"(
ring a b
manual a
share r a b
running s1 tokens=10 world=2 region=r
> a b: run 1-1
gone b
> a: teardown 1
> not serving
a torndown 1
> s1: failed ABORTED WORKER_LOST retry: rank 1 (b) was lost: its control stream closed
)");
}

TEST(HostMemoryTest, AReleasedRegionEndsTheRequest) {
  EXPECT_SCENARIO(R"(
ring a b
share r a b
running s1 tokens=10 world=2 region=r
> a b: run 1-1
b region_gone 1-1
> a b: cancel 1-1
a cancelled 1-1
b cancelled 1-1
> s1: failed CANCELLED REGION_RELEASED: the client released a region that the request needs; rank 1 (b) saw it first
)");
}

TEST(HostMemoryTest, AMemberThatCannotCopyFailsTheRequest) {
  EXPECT_SCENARIO(R"(
ring a
share r a
accepted s1 region=r
> s1: accepted 1-1 on a (host memory: all members have the regions of all tensors)
a stuck 1-1 no staging memory
wait 2s
> s1: failed ABORTED TRANSFER_FAILED retry: rank 0 (a) could not copy the tensors: no staging memory
)");
}

// The client is not to blame while nobody waits for it: here a stands.
TEST(HostMemoryTest, OneThatStandsIsLost) {
  EXPECT_SCENARIO(R"(
ring a b
share r a b
accepted s1 tokens=10 world=2 region=r
> s1: accepted 1-1 on a b (host memory: all members have the regions of all tensors)
b uploaded 1-1
wait 40s
a moved 1-1 5 0
wait 40s
a moved 1-1 5 0
wait 19s
wait 2s
> a: dropped: it took no bytes of its inputs for 1m0.05s in operation 1-1
> not serving
> s1: failed ABORTED WORKER_LOST retry: rank 0 (a) was lost: it took no bytes of its inputs for 1m0.05s in operation 1-1
> serving 2
)");
}

TEST(HostMemoryTest, AClientThatIsWaitedForIsIdle) {
  EXPECT_SCENARIO(R"(
ring a
share r a
accepted s1 region=r
> s1: accepted 1-1 on a (host memory: all members have the regions of all tensors)
wait 29s
a moved 1-1 5 0 waits
wait 29s
a moved 1-1 6 0
wait 40s
a moved 1-1 6 0 waits
wait 29s
wait 2s
> s1: failed DEADLINE_EXCEEDED UPLOAD_IDLE: no tensor bytes arrived for 30s
)");
}

// What crossed on the wire, or was said twice, changes nothing.
TEST(HostMemoryTest, LateAndRepeatedNewsIsNoNews) {
  EXPECT_SCENARIO(R"(
ring a b
share r a b
running s1 tokens=10 world=2 region=r
> a b: run 1-1
a moved 1-1 9 0
a moved 1-1 5 0
a moved 0-7 5 0
a delivered 0-7
a finished 1-1
b finished 1-1
> s1: download
a delivered 1-1
a delivered 1-1
a moved 1-1 9 9
b delivered 1-1
> s1: finished
b delivered 1-1
a moved 1-1 9 9
b region_gone 1-1
)");
}

// Whoever reads by the coordinator says nothing of copies.
TEST(HostMemoryTest, NewsOfCopiesIsOfHostMemoryOnly) {
  EXPECT_SCENARIO(R"(
ring a
running s1
> a: run 1-1
a region_gone 1-1
a delivered 1-1
a finished 1-1
> s1: download
a delivered 1-1
downloaded s1
> s1: finished
)");
}

}  // namespace
}  // namespace ringattn::server
