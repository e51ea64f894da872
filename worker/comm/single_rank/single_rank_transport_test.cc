// Rings of one beyond the contract (worker/comm/contract).
#include "worker/comm/single_rank/single_rank_transport.h"

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/contract/host_ranks.h"
#include "worker/comm/contract/ring_under_test.h"

namespace ringattn::worker {

std::vector<RingUnderTest> RingsUnderTest() {
  RingUnderTest ring;
  ring.name = "single_rank";
  ring.max_world_size = 1;
  ring.single_rank_only = true;
  ring.has_step_timeout = false;
  ring.make_ranks = [](const TestRankOptions& options) {
    return MakeHostRanks(options, [](int) {
      return std::make_unique<SingleRankTransport>(absl::NotFoundError("no library"));
    });
  };
  return {ring};
}

namespace {

TEST(SingleRankTransport, TransfersFailWithoutPeers) {
  SingleRankTransport transport(absl::NotFoundError("no library"));
  auto blob = transport.Prepare(7, 0, 1);
  ASSERT_TRUE(blob.ok());
  auto ring = transport.Connect(7, {*blob}, absl::Now());
  ASSERT_TRUE(ring.ok());
  RunControl control;
  EXPECT_EQ((*ring)->Start({PeerTransfer{}}, {}, &control)->Wait(absl::Now()).code(),
            absl::StatusCode::kUnavailable);
}

TEST(SingleRankTransport, RejectsLargerRingsWithReason) {
  SingleRankTransport transport(absl::NotFoundError("libnccl.so.2: cannot open"));
  const auto blob = transport.Prepare(7, 1, 2);
  ASSERT_EQ(blob.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(blob.status().message()),
              testing::HasSubstr("libnccl.so.2: cannot open"));
}

}  // namespace
}  // namespace ringattn::worker
