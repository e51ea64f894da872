// Members that live and do not move a request's tensors. The language: scenario.h.
#include "gtest/gtest.h"
#include "server/core/testing/scenario.h"

namespace ringattn::server {
namespace {

TEST(TransferTest, OneThatTakesNothingIsLostAndTheClientNotBlamed) {
  EXPECT_SCENARIO(R"(
ring a b
accepted s1 tokens=10 world=2
> s1: accepted 1-1 on a b
stands s1 1
wait 29s
upload s1
wait 29s
stands s1 1
upload s1
wait 2s
upload s1
wait 1s
> b: dropped: it took no bytes of its inputs for 1m0.05s in operation 1-1
> s1: failed ABORTED WORKER_LOST retry: rank 1 (b) was lost: it took no bytes of its inputs for 1m0.05s in operation 1-1
> not serving
> serving 2
)");
}

TEST(TransferTest, OneThatMovesInBetweenIsLeftAlone) {
  EXPECT_SCENARIO(R"(
ring a b
accepted s1 tokens=10 world=2
> s1: accepted 1-1 on a b
stands s1 0 1
wait 29s
upload s1
wait 29s
stands s1
upload s1
stands s1 0 1
wait 29s
upload s1
wait 29s
upload s1
a uploaded 1-1
b uploaded 1-1
> a b: run 1-1
)");
}

// It waits for the others' uploads, and nobody for it.
TEST(TransferTest, OneThatHasEverythingOwesNothing) {
  EXPECT_SCENARIO(R"(
ring a b
accepted s1 tokens=10 world=2
> s1: accepted 1-1 on a b
a uploaded 1-1
stands s1 0 1
wait 29s
upload s1
wait 29s
upload s1
wait 3s
> b: dropped: it took no bytes of its inputs for 1m0.05s in operation 1-1
> s1: failed ABORTED WORKER_LOST retry: rank 1 (b) was lost: it took no bytes of its inputs for 1m0.05s in operation 1-1
> not serving
> serving 2
)");
}

TEST(TransferTest, WhileItComputesNobodyOwesBytes) {
  EXPECT_SCENARIO(R"(
ring a
running s1
> a: run 1-1
stands s1 0
wait 19s
a at 1-1 0 1
wait 19s
a at 1-1 0 2
wait 19s
a at 1-1 0 3
wait 19s
a finished 1-1
> s1: download
wait 20s
)");
}

// Results that clients do not read may hold the staging memory three times as long as a
// client may rest.
TEST(TransferTest, OneThatSendsNothingIsLostLater) {
  EXPECT_SCENARIO(R"(
ring a b
running s1 tokens=10 world=2
> a b: run 1-1
a finished 1-1
b finished 1-1
> s1: download
stands s1 0
wait 29s
download s1
wait 29s
download s1
wait 29s
download s1
wait 29s
download s1
wait 29s
download s1
wait 4s
wait 2s
> a: dropped: it sent no bytes of its outputs for 2m30.05s in operation 1-1
> s1: failed ABORTED WORKER_LOST retry: rank 0 (a) was lost: it sent no bytes of its outputs for 2m30.05s in operation 1-1
> not serving
> serving 2
)");
}

TEST(TransferTest, OneThatSendsNowAndThenIsLeftAlone) {
  EXPECT_SCENARIO(R"(
ring a
running s1
> a: run 1-1
a finished 1-1
> s1: download
stands s1 0
wait 29s
download s1
wait 29s
download s1
wait 29s
download s1
wait 29s
download s1
wait 29s
download s1
stands s1
stands s1 0
wait 29s
download s1
downloaded s1
> s1: finished
)");
}

TEST(TransferTest, AClientThatTakesNothingIsToBlameAtItsOwnLimit) {
  EXPECT_SCENARIO(R"(
ring a
running s1
> a: run 1-1
a finished 1-1
> s1: download
stands s1 0
wait 31s
> s1: failed DEADLINE_EXCEEDED DOWNLOAD_IDLE: the client took no bytes of the result for 30s
)");
}

TEST(TransferTest, APauseOfTheCoordinatorIsNobodysFault) {
  EXPECT_SCENARIO(R"(
ring a
accepted s1
> s1: accepted 1-1 on a
stands s1 0
pause 100s
wait 1s
)");
}

}  // namespace
}  // namespace ringattn::server
