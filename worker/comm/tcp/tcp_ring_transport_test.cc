// TCP rings beyond the contract (worker/comm/contract).
#include "worker/comm/tcp/tcp_ring_transport.h"

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/contract/host_ranks.h"
#include "worker/comm/contract/ring_fixture.h"
#include "worker/comm/contract/ring_under_test.h"

namespace ringattn::worker {
namespace {

using Kind = PeerTransfer::Kind;

RingUnderTest TcpRing() {
  RingUnderTest ring;
  ring.name = "tcp";
  ring.reaches_prepared_ranks = true;
  ring.make_ranks = [](const TestRankOptions& options) {
    return MakeHostRanks(options, [&](int) {
      return std::make_unique<TcpRingTransport>(
          TcpTransportOptions{.step_timeout = options.step_timeout});
    });
  };
  return ring;
}

TEST(TcpRing, AbortReachesPeerDuringTransfer) {
  constexpr int64_t kBytes = int64_t{64} << 20;
  Ranks ranks(TcpRing(), {});
  Ring ring = ranks.Form(1);
  ASSERT_TRUE(Formed(ring));
  RunControl controls[2];
  Memory a(ranks[0], kBytes), b(ranks[1], kBytes);
  EventRef other = ring[1]->Start({{Kind::kReceive, 0, b.data(), kBytes}}, {}, &controls[1]);
  EventRef send = ring[0]->Start({{Kind::kSend, 1, a.data(), kBytes}}, {}, &controls[0]);
  EventRef behind = ring[0]->Start({{Kind::kSend, 1, a.data(), kBytes}}, {}, &controls[0]);
  // Aborts in the middle, when some of the data has arrived.
  const absl::Time begin = absl::Now();
  while (controls[1].progress.load() == 0 && absl::Now() < begin + kAbortBound) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  ring[0]->Abort("rank 1 was lost");
  EXPECT_EQ(behind->Wait(absl::Now() + kAbortBound).code(), absl::StatusCode::kUnavailable);
  // The peer notices, or had received everything before.
  EXPECT_NE(other->Wait(absl::Now() + kAbortBound).code(), absl::StatusCode::kDeadlineExceeded);
}

TEST(TcpRing, SizeMismatchFailsWithoutHarm) {
  Ranks ranks(TcpRing(), {.step_timeout = absl::Milliseconds(300)});
  Ring ring = ranks.Form(1);
  ASSERT_TRUE(Formed(ring));
  RunControl control;
  int64_t a = 5, b = 6;
  EventRef send = ring[0]->Start({{Kind::kSend, 1, &a, 8}}, {}, &control);
  EventRef receive = ring[1]->Start({{Kind::kReceive, 0, &b, 4}}, {}, &control);
  EXPECT_EQ(send->Wait(Soon()).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(receive->Wait(Soon()).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(b, 6);
}

TEST(TcpRing, ListensOnLocalAddressesOnly) {
  TcpRingTransport nowhere({.host = "192.0.2.1"});
  EXPECT_EQ(nowhere.Prepare(1, 0, 2).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace

std::vector<RingUnderTest> RingsUnderTest() { return {TcpRing()}; }

}  // namespace ringattn::worker
