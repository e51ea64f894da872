// In-process rings beyond the contract (worker/comm/contract).
#include "worker/comm/inproc/inproc_communicator.h"

#include <utility>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/contract/host_ranks.h"
#include "worker/comm/contract/ring_under_test.h"
#include "worker/comm/inproc/inproc_ring_transport.h"

namespace ringattn::worker {

std::vector<RingUnderTest> RingsUnderTest() {
  RingUnderTest ring;
  ring.name = "inproc";
  ring.has_step_timeout = false;
  ring.sends_to_itself = true;
  ring.make_ranks = [](const TestRankOptions& options) {
    auto transports = MakeInProcessTransports(options.world_size);
    return MakeHostRanks(options, [&](int rank) { return std::move(transports[rank]); });
  };
  return {ring};
}

namespace {

using Kind = PeerTransfer::Kind;

absl::Time Soon() { return absl::Now() + absl::Seconds(10); }

TEST(InProcessRing, SizesMustAgree) {
  auto ring = MakeInProcessRing(2);
  RunControl control;
  int a = 0;
  int64_t b = 0;
  EventRef send = ring[0]->Start({{Kind::kSend, 1, &a, 4}}, {}, &control);
  EventRef receive = ring[1]->Start({{Kind::kReceive, 0, &b, 8}}, {}, &control);
  EXPECT_EQ(receive->Wait(Soon()).code(), absl::StatusCode::kInternal);
  EXPECT_EQ(send->Wait(Soon()).code(), absl::StatusCode::kUnavailable);
}

TEST(InProcessRing, AbortOfOneRankAbortsAll) {
  auto ring = MakeInProcessRing(2);
  RunControl control;
  int a = 0;
  EventRef receive = ring[1]->Start({{Kind::kReceive, 0, &a, 4}}, {}, &control);
  ring[0]->Abort("rank 0 was lost");
  EXPECT_THAT(receive->Wait(Soon()).message(), testing::HasSubstr("rank 0 was lost"));
}

}  // namespace
}  // namespace ringattn::worker
