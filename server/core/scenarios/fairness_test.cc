// Whose turn it is: among clients, and among small and large requests. The language:
// scenario.h. A worker of 1e5 FLOP/s is predicted to compute 0.16 s for 8 tokens (a tile) and
// 42 s for 1000.
#include <string>

#include "gtest/gtest.h"
#include "server/core/testing/scenario.h"

namespace ringattn::server {
namespace {

// Two of a large client's wait already when a small one of another comes: it runs after the one
// that computes.
TEST(FairnessTest, ASmallRequestRunsNext) {
  EXPECT_SCENARIO(R"(
join a flops=1e5
wait 300ms
> serving 1
running l1 tokens=1000 client=large
> a: run 1-1
accepted l2 tokens=1000 client=large
> l2: accepted 1-2 on a
accepted l3 tokens=1000 client=large
> l3: accepted 1-3 on a
a uploaded 1-3          # l2 was first in the queue, but l3 can run
a uploaded 1-2
accepted small tokens=8 client=small
> small: accepted 1-4 on a
a uploaded 1-4
a finished 1-1
> l1: download
> a: run 1-4
a finished 1-4
> small: download
> a: run 1-2
a finished 1-2
> l2: download
> a: run 1-3
)");
}

// Predicted are 42 s each, but the large client's first run takes 100: then the other's requests
// go before its next one until they have had as much.
TEST(FairnessTest, AClientPaysForWhatItsRunsTook) {
  EXPECT_SCENARIO(R"(
join a flops=1e5
wait 300ms
> serving 1
running l1 tokens=1000 client=large
> a: run 1-1
accepted l2 tokens=1000 client=large
> l2: accepted 1-2 on a
a uploaded 1-2
accepted o1 tokens=1000 client=other
> o1: accepted 1-3 on a
a uploaded 1-3
accepted o2 tokens=1000 client=other
> o2: accepted 1-4 on a
a uploaded 1-4
wait 100s
a finished 1-1
> l1: download
> a: run 1-3
wait 29s
a finished 1-3
> o1: download
> a: run 1-4
a finished 1-4
> o2: download
> a: run 1-2
)");
}

// What is cancelled while it runs has cost what it took until then.
TEST(FairnessTest, ACancelledRunIsPaidFor) {
  EXPECT_SCENARIO(R"(
join a flops=1e5
wait 300ms
> serving 1
running l1 tokens=1000 client=large
> a: run 1-1
accepted l2 tokens=1000 client=large
> l2: accepted 1-2 on a
a uploaded 1-2
accepted o1 tokens=1000 client=other
> o1: accepted 1-3 on a
a uploaded 1-3
accepted o2 tokens=1000 client=other
> o2: accepted 1-4 on a
a uploaded 1-4
wait 100s
end l1
> l1: failed CANCELLED CLIENT_CANCELLED
> a: cancel 1-1
a cancelled 1-1
> a: run 1-3
wait 42s
a finished 1-3
> o1: download
> a: run 1-4
)");
}

// Callers that share a connection: the small one does not wait for the large ones' queue.
TEST(FairnessTest, ASmallRequestPassesLargeOnesOfItsConnection) {
  EXPECT_SCENARIO(R"(
join a flops=1e5
wait 300ms
> serving 1
running l1 tokens=1000 client=shared
> a: run 1-1
accepted l2 tokens=1000 client=shared
> l2: accepted 1-2 on a
a uploaded 1-2
accepted small tokens=8 client=shared
> small: accepted 1-3 on a
a uploaded 1-3
a finished 1-1
> l1: download
> a: run 1-3
a finished 1-3
> small: download
> a: run 1-2
)");
}

// Short runs follow each other without a gap; a long one is not sent ahead.
TEST(FairnessTest, OnlyShortRunsAreSentAhead) {
  EXPECT_SCENARIO(R"(
join a flops=1e9
wait 300ms
> serving 1
running s1
> a: run 1-1
running s2
> a: run 1-2
accepted s3 tokens=100000
> s3: accepted 1-3 on a
a uploaded 1-3
> a: run 1-3
accepted s4
> s4: accepted 1-4 on a
a uploaded 1-4
a finished 1-1
> s1: download
a finished 1-2
> s2: download
a finished 1-3
> s3: download
> a: run 1-4
)");
}

// The six common places are the large client's. Nobody else's small request waits for one; of
// another large one it is the turn as soon as a place is free.
TEST(FairnessTest, ALargeClientLeavesPlacesForSmallRequests) {
  EXPECT_SCENARIO(R"(
join a flops=1e5
wait 300ms
> serving 1
running l1 tokens=1000 client=large
> a: run 1-1
accepted l2 tokens=1000 client=large
> l2: accepted 1-2 on a
accepted l3 tokens=1000 client=large
> l3: accepted 1-3 on a
accepted l4 tokens=1000 client=large
> l4: accepted 1-4 on a
accepted l5 tokens=1000 client=large
> l5: accepted 1-5 on a
accepted l6 tokens=1000 client=large
> l6: accepted 1-6 on a
request l7 tokens=1000 client=large
request m1 tokens=900 client=medium
request small tokens=8 client=small
> a: reserve 1-7 [0]
a reserved 1-7
> small: accepted 1-7 on a
request small2 tokens=8 client=small     # one express place for a client
request other tokens=8 client=other
> a: reserve 1-8 [0]
end l2
> l2: failed CANCELLED CLIENT_CANCELLED
> a: reserve 1-9 [0]
a reserved 1-9
> m1: accepted 1-9 on a
end l3
> l3: failed CANCELLED CLIENT_CANCELLED
> a: reserve 1-10 [0]
a reserved 1-10
> small2: accepted 1-10 on a
)");
}

// Half of it is for others.
TEST(FairnessTest, OneClientCannotFillTheQueue) {
  CoordinatorConfig config = ScenarioConfig();
  config.limits.max_queued_requests = 4;
  config.limits.max_queued_requests_per_client = 2;
  config.max_operations_per_worker = 1;
  EXPECT_EQ(RunScenario(R"(
ring a
accepted s1 client=x
request s2 client=x
request s3 client=x
request s4 client=x
request s5 client=y
request s6 client=y
request s7 client=z
)",
                        config),
            R"(
ring a
accepted s1 client=x
> s1: accepted 1-1 on a
request s2 client=x
request s3 client=x
request s4 client=x
> s4: failed RESOURCE_EXHAUSTED CLIENT_QUEUE_FULL retry: this client's part of the queue is full: 2 of 2 requests, 192 of 34359738368 bytes wait
request s5 client=y
request s6 client=y
request s7 client=z
> s7: failed RESOURCE_EXHAUSTED QUEUE_FULL retry: the queue is full: 4 of 4 requests, 384 of 68719476736 bytes wait
)");
}

// What the operator grants one client, whatever the others have.
TEST(FairnessTest, AClientsOwnQuotas) {
  CoordinatorConfig config = ScenarioConfig();
  config.max_operations_per_worker = 1;
  const char* script = R"(
ring a
accepted s1 client=x in_flight=2
> s1: accepted 1-1 on a
request s2 client=x in_flight=2
request s3 client=x in_flight=2
> s3: failed RESOURCE_EXHAUSTED CLIENT_REQUESTS_IN_FLIGHT retry: this client has 2 requests in flight, as many as it may have at a time
request s2b id=s2 client=x in_flight=2   # takes the other's place
> s2: failed ABORTED SUPERSEDED: a newer stream took over request_id s2
request s4 client=y queued_bytes=191
request s5 client=y queued_bytes=191     # 96 bytes each
> s5: failed RESOURCE_EXHAUSTED CLIENT_QUEUE_FULL retry: this client's part of the queue is full: 1 of 128 requests, 96 of 191 bytes wait
request s6 client=y queued_bytes=192
request s7 client=z queued_bytes=1       # one alone always fits
)";
  EXPECT_EQ(RunScenario(script, config), script);
}

// Twice the device time for twice the weight.
TEST(FairnessTest, SharesAreByWeight) {
  EXPECT_SCENARIO(R"(
join a flops=1e5
wait 300ms
> serving 1
running one1 tokens=1000 client=one
> a: run 1-1
accepted two1 tokens=1000 client=two weight=2
> two1: accepted 1-2 on a
a uploaded 1-2
accepted one2 tokens=1000 client=one
> one2: accepted 1-3 on a
a uploaded 1-3
accepted two2 tokens=1000 client=two weight=2
> two2: accepted 1-4 on a
a uploaded 1-4
accepted two3 tokens=1000 client=two weight=2
> two3: accepted 1-5 on a
a uploaded 1-5
wait 10s
a finished 1-1
> one1: download
> a: run 1-2
wait 12s
a finished 1-2
> two1: download
> a: run 1-4
wait 12s
a finished 1-4
> two2: download
> a: run 1-3
)");
}

TEST(FairnessTest, RequestIdsArePrincipalsOwn) {
  EXPECT_SCENARIO(R"(
ring a
accepted s1 id=job principal=alice header=1
> s1: accepted 1-1 on a
accepted s2 id=job principal=bob header=2
> s2: accepted 1-2 on a
accepted s3 id=job header=3
> s3: accepted 1-3 on a
cancel job principal=mallory
cancel job principal=bob
> s2: failed CANCELLED CANCELLED: cancelled by Cancel
state job principal=alice
> job: UPLOADING on a
state job principal=bob
> job: FAILED on a: CANCELLED
state job
> job: UPLOADING on a
state job principal=mallory
> job: unknown
request s4 id=job principal=alice header=4
> s4: failed INVALID_ARGUMENT REQUEST_ID_REUSED field request_id: request_id job is in flight with a different header
)");
}

// Predictions are rough, so this much more is let go: twenty times as long, and the floor.
TEST(FairnessTest, ARunEndsThatTakesFarLongerThanPredicted) {
  CoordinatorConfig config = ScenarioConfig();
  config.run_time_floor = absl::Seconds(3);
  const std::string early = RunScenario("ring a\nrunning s1\nwait 2.9s\n", config);
  EXPECT_EQ(early.find("failed"), std::string::npos) << early;
  const std::string late = RunScenario("ring a\nrunning s1\nwait 3.1s\n", config);
  EXPECT_NE(late.find("s1: failed DEADLINE_EXCEEDED RUN_TOO_LONG: computing took longer than 3s"),
            std::string::npos)
      << late;
  EXPECT_NE(late.find("a: cancel 1-1"), std::string::npos) << late;
}

// It would occupy a worker until its deadline, for nothing.
TEST(FairnessTest, WhatCannotMeetItsDeadlineIsToldAtOnce) {
  const std::string text = RunScenario(R"(
join a flops=1e5
wait 300ms
request s1 tokens=100000 deadline=10s
request s2 tokens=1000 deadline=10s
)");
  EXPECT_NE(text.find("s1: failed DEADLINE_EXCEEDED DEADLINE_TOO_SHORT: computing is predicted"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("> a: reserve 1-1 [0]"), std::string::npos) << text;
}

}  // namespace
}  // namespace ringattn::server
