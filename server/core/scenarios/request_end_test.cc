// Requests that end early: cancel, deadline, silence, take-over. The language: scenario.h.
#include "gtest/gtest.h"
#include "server/core/testing/scenario.h"

namespace ringattn::server {
namespace {

TEST(RequestEndTest, CancelWhileQueued) {
  EXPECT_SCENARIO(R"(
join a
request s1
cancel s1
> s1: failed CANCELLED CANCELLED: cancelled by Cancel
cancel s1
wait 1s
> serving 1
)");
}

TEST(RequestEndTest, CancelWhileReserving) {
  EXPECT_SCENARIO(R"(
ring a b
manual a
request s1 tokens=10 world=2
> a b: reserve 1-1 [0 1]
a reserved 1-1
cancel s1
> s1: failed CANCELLED CANCELLED: cancelled by Cancel
> a: release 1-1
b reserved 1-1
stats
> queued 0 active 0 memory held ready 2
a released 1-1
stats
> queued 0 active 0 memory free ready 2
)");
}

TEST(RequestEndTest, CancelWhileUploading) {
  EXPECT_SCENARIO(R"(
ring a
accepted s1
> s1: accepted 1-1 on a
end s1
> s1: failed CANCELLED CLIENT_CANCELLED
state s1
> s1: FAILED on a: CLIENT_CANCELLED
stats
> queued 0 active 0 memory free ready 1
)");
}

TEST(RequestEndTest, CancelWhileComputingKeepsTheMembersUntilTheyHaveStopped) {
  EXPECT_SCENARIO(R"(
ring a b
running s1 tokens=10 world=2
> a b: run 1-1
a finished 1-1
cancel s1
> s1: failed CANCELLED CANCELLED: cancelled by Cancel
> b: cancel 1-1
stats
> queued 0 active 0 memory held ready 2
b cancelled 1-1
stats
> queued 0 active 0 memory free ready 2
request s2
> a: reserve 1-2 [0]
)");
}

TEST(RequestEndTest, CancelWhileDownloading) {
  EXPECT_SCENARIO(R"(
ring a
running s1
> a: run 1-1
a finished 1-1
> s1: download
end s1
> s1: failed CANCELLED CLIENT_CANCELLED
downloaded s1
stats
> queued 0 active 0 memory free ready 1
)");
}

TEST(RequestEndTest, DeadlineWhileQueued) {
  EXPECT_SCENARIO(R"(
join a
request s1 deadline=100ms
wait 100ms
> s1: failed DEADLINE_EXCEEDED DEADLINE_EXCEEDED: the deadline passed while the request was queued
)");
}

TEST(RequestEndTest, DeadlineWhileUploading) {
  EXPECT_SCENARIO(R"(
ring a
accepted s1 deadline=100ms
> s1: accepted 1-1 on a
wait 100ms
> s1: failed DEADLINE_EXCEEDED DEADLINE_EXCEEDED: the deadline passed while the request was uploading
)");
}

TEST(RequestEndTest, DeadlineWhileComputing) {
  EXPECT_SCENARIO(R"(
ring a
running s1 deadline=1s
> a: run 1-1
wait 1s
> s1: failed DEADLINE_EXCEEDED DEADLINE_EXCEEDED: the deadline passed while the request was computing
> a: cancel 1-1
a cancelled 1-1
stats
> queued 0 active 0 memory free ready 1
)");
}

TEST(RequestEndTest, DeadlineWhileDownloading) {
  EXPECT_SCENARIO(R"(
ring a
running s1 deadline=1s
> a: run 1-1
a finished 1-1
> s1: download
wait 1s
> s1: failed DEADLINE_EXCEEDED DEADLINE_EXCEEDED: the deadline passed while the request was downloading
)");
}

TEST(RequestEndTest, DeadlineAlreadyPassed) {
  EXPECT_SCENARIO(R"(
ring a
request s1 deadline=0s
> s1: failed DEADLINE_EXCEEDED DEADLINE_EXCEEDED: the deadline passed while the request was arriving
)");
}

TEST(RequestEndTest, AnIdleUploadGivesItsMemoryBack) {
  EXPECT_SCENARIO(R"(
ring a
accepted s1
> s1: accepted 1-1 on a
wait 29s
upload s1
wait 29s
wait 2s
> s1: failed DEADLINE_EXCEEDED UPLOAD_IDLE: no tensor bytes arrived for 30s
stats
> queued 0 active 0 memory free ready 1
)");
}

TEST(RequestEndTest, AnIdleDownloadGivesItsMemoryBack) {
  EXPECT_SCENARIO(R"(
ring a
request s1
> a: reserve 1-1 [0]
a reserved 1-1
> s1: accepted 1-1 on a
a uploaded 1-1
> a: run 1-1
a finished 1-1
> s1: download
wait 29s
download s1
wait 29s
stats
> queued 0 active 1 memory held ready 1
wait 2s
> s1: failed DEADLINE_EXCEEDED DOWNLOAD_IDLE: the client took no bytes of the result for 30s
stats
> queued 0 active 0 memory free ready 1
)");
}

TEST(RequestEndTest, TheSameRequestAgainTakesOver) {
  EXPECT_SCENARIO(R"(
ring a
accepted s1 id=x header=7
> s1: accepted 1-1 on a
request s2 id=x header=7
> s1: failed ABORTED SUPERSEDED: a newer stream took over request_id x
> a: reserve 1-2 [0]
state x
> x: QUEUED
a reserved 1-2
> s2: accepted 1-2 on a
a uploaded 1-2
> a: run 1-2
request s3 id=x header=7
> s2: failed ABORTED SUPERSEDED: a newer stream took over request_id x
> a: cancel 1-2
> a: reserve 1-3 [0]
a cancelled 1-2
end s1
end s2
a reserved 1-3
> s3: accepted 1-3 on a
a uploaded 1-3
> a: run 1-3
a finished 1-3
> s3: download
downloaded s3
> s3: finished
state x
> x: SUCCEEDED on a
)");
}

TEST(RequestEndTest, AnotherRequestUnderTheSameIdIsRefused) {
  EXPECT_SCENARIO(R"(
ring a
request s1 id=x header=7
> a: reserve 1-1 [0]
request s2 id=x header=8
> s2: failed INVALID_ARGUMENT REQUEST_ID_REUSED field request_id: request_id x is in flight with a different header
a reserved 1-1
> s1: accepted 1-1 on a
a uploaded 1-1
> a: run 1-1
a finished 1-1
> s1: download
downloaded s1
> s1: finished
request s3 id=x header=8
> a: reserve 1-2 [0]
)");
}

}  // namespace
}  // namespace ringattn::server
