// What the planner is told of the workers' measurements. The language: scenario.h.
#include "gtest/gtest.h"
#include "server/core/testing/scenario.h"

namespace ringattn::server {
namespace {

// Per step one call of 1 s; what members measured of this ring counts, and the
// slowest of them.
TEST(MeasuredRatesTest, PlansAreMadeOfWhatTheRingMeasured) {
  EXPECT_SCENARIO(R"(
join a flops=1e18 call=1
join b flops=1e18 call=0.5
manual a b
wait 300ms
> a: prepare 1 rank 0 of 2
> b: prepare 1 rank 1 of 2
a prepared 1
b prepared 1
> a b: commit 1 [a b]
a committed 1 link=1e18 exchange=4
b committed 1 link=4 exchange=2
> serving 1
request s1 tokens=10 world=2    # K and V of 5 tokens: 40 bytes at 4 bytes/s, and 4 s
> a b: reserve 1-1 [0 1]
predicted s1
> s1: 16 s
)");
}

// Two steps of one tile, 128 x 128 pairs of 4 operations each, and one call of 1 s: the slowest
// member's rate for the request's dtype counts.
TEST(MeasuredRatesTest, TheFamilyThatServesTheRequestCounts) {
  EXPECT_SCENARIO(R"(
join a flops=100 flops_bf16=1e18 call=1
join b flops=1e18 flops_bf16=1e18 call=1
wait 300ms
> serving 1
request s1 tokens=10 world=2
> a b: reserve 1-1 [0 1]
predicted s1
> s1: 1312.72 s
)");
  EXPECT_SCENARIO(R"(
join a flops=100 flops_bf16=1e18 call=1
join b flops=1e18 flops_bf16=1e18 call=1
wait 300ms
> serving 1
request s1 tokens=10 dtype=bf16 world=2
> a b: reserve 1-1 [0 1]
predicted s1
> s1: 2 s
)");
}

// Requests with score terms have a rate of their own, so that their steps may take as long as
// they do.
TEST(MeasuredRatesTest, ScoreTermsHaveTheirOwnRate) {
  EXPECT_SCENARIO(R"(
join a options=segment_ids flops=1e18 flops_terms=100 call=1
join b options=segment_ids flops=1e18 flops_terms=1e18 call=1
wait 300ms
> serving 1
request s1 tokens=10 world=2 option=segment_ids
> a b: reserve 1-1 [0 1]
predicted s1
> s1: 1312.72 s
)");
}

// A device without kernels for an option: refused by its name, before anything is reserved, where
// too few members serve it.
TEST(MeasuredRatesTest, AnOptionThatADeviceLacksIsRefusedByName) {
  EXPECT_SCENARIO(R"(
join a options=segment_ids device=cpu
join b device=cuda
wait 300ms
> serving 1
request s1 tokens=10 world=2 option=segment_ids
> s1: failed UNIMPLEMENTED OPTION_NOT_SERVED field options.segment_ids: options.segment_ids: the kernels of device cuda (worker b) do not serve it
request s2 tokens=10 world=2
> a b: reserve 1-1 [0 1]
)");
  // One member serves it: that one is taken.
  EXPECT_SCENARIO(R"(
join a device=cuda
join b options=segment_ids device=cpu
wait 300ms
> serving 1
request s1 tokens=10 world=1 option=segment_ids
> b: reserve 1-1 [1]
)");
}

// Figures of a ring that has ended say nothing about the next one.
TEST(MeasuredRatesTest, AnotherRingIsMeasuredAnew) {
  EXPECT_SCENARIO(R"(
join a flops=1e18 call=1
join b flops=1e18 call=1
manual a b
wait 300ms
> a: prepare 1 rank 0 of 2
> b: prepare 1 rank 1 of 2
a prepared 1
b prepared 1
> a b: commit 1 [a b]
a committed 1 link=4 exchange=100
b committed 1 link=4 exchange=100
> serving 1
reform
> a b: teardown 1
> not serving
a torndown 1
b torndown 1
wait 300ms
> a: prepare 2 rank 0 of 2
> b: prepare 2 rank 1 of 2
a prepared 2
b prepared 2
> a b: commit 2 [a b]
a committed 2
b committed 2 link=40 exchange=1
> reformed 2 OK
> serving 2
request s1 tokens=10 world=2    # 40 bytes at b's 40 bytes/s, and 1 s
> a b: reserve 2-1 [0 1]
predicted s1
> s1: 4 s
)");
}

}  // namespace
}  // namespace ringattn::server
