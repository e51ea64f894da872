// Requests whose clients stream to the members themselves. The language: scenario.h, which also
// checks that no two tokens are the same and that members and clients get the same ones.
#include "gtest/gtest.h"
#include "server/core/testing/scenario.h"

namespace ringattn::server {
namespace {

TEST(DirectStreamTest, ItEndsWhenEveryMemberHasDelivered) {
  EXPECT_SCENARIO(R"(
ring a b
request s1 tokens=10 world=2 direct=1
> a b: reserve 1-1 [0 1]
a reserved 1-1
b reserved 1-1
> s1: accepted 1-1 on a b (direct stream: all members have a client data address) a:2 b:2
a moved 1-1 5 0 waits
a uploaded 1-1
b uploaded 1-1
> a b: run 1-1
b finished 1-1
a finished 1-1
> s1: download
a delivered 1-1
b delivered 1-1
> s1: finished
b delivered 1-1
)");
}

TEST(DirectStreamTest, WhereAMemberIsNotReachedTheCoordinatorServes) {
  EXPECT_SCENARIO(R"(
ring a hidden
accepted s1 tokens=10 world=2 direct=1
> s1: accepted 1-1 on a hidden (no direct stream: hidden has no client data address)
request s2 tokens=10 world=2 direct=1 required=1
> s2: failed FAILED_PRECONDITION TRANSPORT_UNAVAILABLE field transport.required: transport.required: no direct stream: hidden has no client data address
)");
}

// No worker writes into the client's memory: its failure need not wait for them.
TEST(DirectStreamTest, TheClientLearnsOfAnEndAtOnce) {
  EXPECT_SCENARIO(R"(
ring a b
manual a b
running s1 tokens=10 world=2 direct=1
> a b: run 1-1
end s1
> s1: failed CANCELLED CLIENT_CANCELLED
> a b: cancel 1-1
)");
}

// A generation's tokens are good for nothing in the next one: the scenario would say so.
TEST(DirectStreamTest, TheNextGenerationHasOtherTokens) {
  EXPECT_SCENARIO(R"(
ring a b
accepted s1 tokens=10 world=2 direct=1
> s1: accepted 1-1 on a b (direct stream: all members have a client data address) a:2 b:2
reform
> s1: failed ABORTED RING_ENDED retry: the ring ended: an operator asked for a new one
> not serving
wait 300ms
> reformed 2 OK
> serving 2
accepted s1 tokens=10 world=2 direct=1
> s1: accepted 2-2 on a b (direct stream: all members have a client data address) a:2 b:2
a moved 1-1 9 0
a uploaded 1-1
b delivered 1-1
a moved 2-2 1 0
)");
}

TEST(DirectStreamTest, WhatTheClientSentWrongIsItsOwnFault) {
  EXPECT_SCENARIO(R"(
ring a b
accepted s1 tokens=10 world=2 direct=1
> s1: accepted 1-1 on a b (direct stream: all members have a client data address) a:2 b:2
b got_wrong 1-1 q: 8 bytes at 4 were sent twice
> s1: failed INVALID_ARGUMENT BAD_CHUNK field chunk: what rank 1 (b) got from the client: q: 8 bytes at 4 were sent twice
b got_wrong 1-1 once more
)");
}

TEST(DirectStreamTest, ABrokenStreamIsTriedAgain) {
  EXPECT_SCENARIO(R"(
ring a
accepted s1 direct=1
> s1: accepted 1-1 on a (direct stream: all members have a client data address) a:2
a stuck 1-1 the client's stream broke
wait 2s
> s1: failed ABORTED TRANSFER_FAILED retry: rank 0 (a) could not copy the tensors: the client's stream broke
)");
}

// A slow client that moves is not idle, whatever a member waits for between its chunks.
TEST(DirectStreamTest, AClientThatMovesIsNotIdle) {
  EXPECT_SCENARIO(R"(
ring a b
accepted s1 tokens=10 world=2 direct=1
> s1: accepted 1-1 on a b (direct stream: all members have a client data address) a:2 b:2
b moved 1-1 0 0 waits
a moved 1-1 1 0 waits
wait 29s
a moved 1-1 2 0 waits
wait 29s
a moved 1-1 3 0 waits
wait 29s
a moved 1-1 2 0 waits
wait 2s
> s1: failed DEADLINE_EXCEEDED UPLOAD_IDLE: no tensor bytes arrived for 30s
)");
}

// The others wait for the client, which waits for a: a is to blame.
TEST(DirectStreamTest, AMemberThatStandsIsLostNotTheClient) {
  EXPECT_SCENARIO(R"(
ring a b
accepted s1 tokens=10 world=2 direct=1
> s1: accepted 1-1 on a b (direct stream: all members have a client data address) a:2 b:2
a moved 1-1 1 0
b moved 1-1 4 0
b uploaded 1-1
wait 59s
wait 2s
> a: dropped: it took no bytes of its inputs for 1m0.05s in operation 1-1
> s1: failed ABORTED WORKER_LOST retry: rank 0 (a) was lost: it took no bytes of its inputs for 1m0.05s in operation 1-1
> not serving
> serving 2
)");
}

TEST(DirectStreamTest, AClientThatTakesNothingIsIdle) {
  EXPECT_SCENARIO(R"(
ring a
running s1 direct=1
> a: run 1-1
a finished 1-1
> s1: download
a moved 1-1 9 4 waits
wait 29s
a moved 1-1 9 5 waits
wait 29s
wait 2s
> s1: failed DEADLINE_EXCEEDED DOWNLOAD_IDLE: the client took no bytes of the result for 30s
)");
}

}  // namespace
}  // namespace ringattn::server
