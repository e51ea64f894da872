// What Forwards leave for Backwards, from the wish to its end. The language: scenario.h.
#include "gtest/gtest.h"
#include "server/core/scenario.h"

namespace ringattn::server {
namespace {

// A Forward on both, kept as h-s1.
constexpr char kKept[] = R"(
running s1 tokens=100 world=2 retain=1m
> s1: accepted 1-1 on a b
> a b: run 1-1
a finished 1-1
b finished 1-1
> s1: download
downloaded s1
> s1: finished h-s1
> a b: release 1-1 keeping
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
> a b: release 1-2
request s3 id=another residual=h-s1
> s3: failed FAILED_PRECONDITION RESIDUAL_CONSUMED: the residual was used by another Backward, which did not keep it: send the tensors
running s4 id=back residual=h-s1    # its answer was lost
> s4: accepted 1-3 on a b
> a b: run 1-3
end s4
> s4: failed CANCELLED CLIENT_CANCELLED
> a b: cancel 1-3
a cancelled 1-3
b cancelled 1-3
> a b: release 1-3
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
> s2: accepted 1-2 on a b
> a b: run 1-2
a broke 1-2 no kernel
b finished 1-2
wait 2s
> s2: failed INTERNAL COMPUTE_FAILED: rank 0 (a) failed: no kernel
> a b: release 1-2
running s3 residual=h-s1 keep
> s3: accepted 1-3 on a b
> a b: run 1-3
a finished 1-3
b finished 1-3
> s3: download
downloaded s3
> s3: finished
> a b: release 1-3
residuals
> 1 of 200 bytes, kept 1 refused 0 read 1
)"));
}

TEST(ResidualScenarioTest, AFailedForwardLeavesNothing) {
  EXPECT_SCENARIO(R"(
ring a b
running s1 tokens=100 world=2 retain=1m
> s1: accepted 1-1 on a b
> a b: run 1-1
a finished 1-1
b finished 1-1
> s1: download
end s1
> s1: failed CANCELLED CLIENT_CANCELLED
> a b: release 1-1
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
> a b: release 1-2
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
> s1: accepted 1-1 on a
> a: run 1-1
a finished 1-1
> s1: download
downloaded s1
> s1: finished h-s1
> a: release 1-1 keeping
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
> a b: teardown 1
> a: prepare 2 rank 0 of 3
)"));
}

}  // namespace
}  // namespace ringattn::server
