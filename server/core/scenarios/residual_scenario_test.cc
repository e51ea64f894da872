// What Forwards leave for Backwards, from the wish to its end. The language: scenario.h.
#include "gtest/gtest.h"
#include "server/core/testing/scenario.h"

namespace ringattn::server {
namespace {

// A Forward on both, kept as h-s1.
constexpr char kKept[] = R"(
running s1 tokens=100 world=2 retain=1m
> a b: run 1-1
a finished 1-1
b finished 1-1
> s1: download
downloaded s1
> s1: finished h-s1
)";

std::string AfterKept(const std::string& rest) {
  return std::string("\nring a b") + kKept + rest.substr(1);
}

TEST(ResidualScenarioTest, IsReadOnceAndReplayedForAWhile) {
  EXPECT_SCENARIO(AfterKept(R"(
memory
> a 100, b 100
residuals
> 1 of 200 bytes, kept 1 refused 0 read 0
request s2 id=back residual=h-s1
> a b: reserve 1-2 [0 1] reads 1-1
a reserved 1-2
b reserved 1-2
> s2: accepted 1-2 on a b
a uploaded 1-2
b uploaded 1-2
> a b: run 1-2
a finished 1-2
b finished 1-2
> s2: download
downloaded s2
> s2: finished
request s3 id=another residual=h-s1
> s3: failed FAILED_PRECONDITION RESIDUAL_CONSUMED: the residual was used by another Backward, which did not keep it: send the tensors
running s4 id=back residual=h-s1    # its answer was lost
> a b: run 1-3
end s4
> s4: failed CANCELLED CLIENT_CANCELLED
> a b: cancel 1-3
a cancelled 1-3
b cancelled 1-3
wait 61s
> a b: drop 1-1
request s5 id=back residual=h-s1
> s5: failed FAILED_PRECONDITION RESIDUAL_CONSUMED: the residual was used by another Backward, which did not keep it: send the tensors
residuals
> 0 of 0 bytes, kept 1 refused 0 read 1 consumed 1
memory
> a 0, b 0
)"));
}

TEST(ResidualScenarioTest, AFailedBackwardLeavesIt) {
  EXPECT_SCENARIO(AfterKept(R"(
running s2 residual=h-s1
> a b: run 1-2
a broke 1-2 no kernel
b finished 1-2
wait 2s
> s2: failed INTERNAL COMPUTE_FAILED: rank 0 (a) failed: no kernel
running s3 residual=h-s1 keep
> a b: run 1-3
a finished 1-3
b finished 1-3
> s3: download
downloaded s3
> s3: finished
residuals
> 1 of 200 bytes, kept 1 refused 0 read 1
)"));
}

TEST(ResidualScenarioTest, AFailedForwardLeavesNothing) {
  EXPECT_SCENARIO(R"(
ring a b
running s1 tokens=100 world=2 retain=1m
> a b: run 1-1
a finished 1-1
b finished 1-1
> s1: download
end s1
> s1: failed CANCELLED CLIENT_CANCELLED
residuals
> 0 of 0 bytes, kept 0 refused 0 read 0
)");
}

TEST(ResidualScenarioTest, ExpiresUnlessSomebodyWaitsToReadIt) {
  EXPECT_SCENARIO(AfterKept(R"(
wait 50s
renew h-s1 30s
wait 25s
request s2 residual=h-s1
> a b: reserve 1-2 [0 1] reads 1-1
a reserved 1-2
wait 6s    # its time is over, but it is being read
end s2
> s2: failed CANCELLED CLIENT_CANCELLED
wait 1s
> a b: drop 1-1
request s3 residual=h-s1
> s3: failed FAILED_PRECONDITION RESIDUAL_EXPIRED: the residual was kept for as long as was asked for, and is gone: send the tensors
)"));
}

TEST(ResidualScenarioTest, IsItsOwnersAlone) {
  EXPECT_SCENARIO(R"(
ring a
running s1 principal=alice retain=1m
> a: run 1-1
a finished 1-1
> s1: download
downloaded s1
> s1: finished h-s1
request s2 principal=bob residual=h-s1
> s2: failed NOT_FOUND RESIDUAL_NOT_FOUND field residual_handle: this client has no such residual: send the tensors
delete h-s1 principal=bob
renew h-s1 1s principal=bob
wait 2s
delete h-s1 principal=alice
> a: drop 1-1
request s3 principal=bob residual=h-s1
> s3: failed NOT_FOUND RESIDUAL_NOT_FOUND field residual_handle: this client has no such residual: send the tensors
request s4 principal=alice residual=h-s1
> s4: failed FAILED_PRECONDITION RESIDUAL_CONSUMED: the residual was deleted: send the tensors
)");
}

TEST(ResidualScenarioTest, GoesWithItsWorkerAndNotWithItsRing) {
  EXPECT_SCENARIO(AfterKept(R"(
join c
wait 1s
> not serving
> serving 2
request s2 residual=h-s1
> a b: reserve 2-2 [0 1] reads 1-1
gone a
> b: drop 1-1
> s2: failed FAILED_PRECONDITION RESIDUAL_LOST: the residual is gone with a worker that had a part of it: send the tensors
> not serving
wait 1s
> serving 3
memory
> b 0, c 0
)"));
}

TEST(ResidualScenarioTest, OneThatAWorkerHasNotIsLost) {
  EXPECT_SCENARIO(AfterKept(R"(
request s2 residual=h-s1
> a b: reserve 1-2 [0 1] reads 1-1
a missing 1-2
> a b: drop 1-1
> s2: failed FAILED_PRECONDITION RESIDUAL_LOST: the residual is gone with a worker that had a part of it: send the tensors
b reserved 1-2
memory
> a 0, b 0
)"));
}

// A Forward takes 20 bytes a token, and leaves 100 in all.
TEST(ResidualScenarioTest, WhoeverNeedsTheMemoryGetsIt) {
  EXPECT_SCENARIO(R"(
join a memory=1000
wait 300ms
> serving 1
running s1 tokens=20 retain=1m
> a: run 1-1
a finished 1-1
> s1: download
downloaded s1
> s1: finished h-s1
running s2 tokens=20 retain=1m
> a: run 1-2
a finished 1-2
> s2: download
downloaded s2
> s2: finished h-s2
memory
> a 200
request s3 tokens=45    # the oldest goes, the other may stay
> a: drop 1-1
> a: reserve 1-3 [0]
memory
> a 1000
request s4 residual=h-s1
> s4: failed FAILED_PRECONDITION RESIDUAL_LOST: the residual made room for a request that needed its memory: send the tensors
residuals
> 1 of 100 bytes, kept 2 refused 0 read 0 evicted 1
)");
}

TEST(ResidualScenarioTest, OneThatIsNotUsedUpIsWorthSomePatience) {
  EXPECT_SCENARIO(R"(
join a memory=1000
wait 300ms
> serving 1
running s1 tokens=20 retain=1m
> a: run 1-1
a finished 1-1
> s1: download
downloaded s1
> s1: finished h-s1
accepted s2 tokens=30
> s2: accepted 1-2 on a
request s3 tokens=20    # fits when s2 has ended
memory
> a 700
end s2
> s2: failed CANCELLED CLIENT_CANCELLED
> a: reserve 1-3 [0]
)");
}

TEST(ResidualScenarioTest, AForwardGoesOnWhereItCannotBeKept) {
  EXPECT_SCENARIO(R"(
join a memory=3000
join b memory=3000
join c memory=3000
wait 300ms
> serving 1
running s1 tokens=300 world=3 retain=1m
> a b c: run 1-1
a finished 1-1
b finished 1-1
c finished 1-1
> s1: download
downloaded s1
> s1: finished, not kept: no worker has the memory to keep the inputs as they are
residuals
> 0 of 0 bytes, kept 0 refused 1 read 0
)");
}

}  // namespace
}  // namespace ringattn::server
