// TCP rings beyond the contract (worker/comm/contract).
#include "worker/comm/tcp/tcp_ring_transport.h"

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
  ring.isolates_peers = true;
  ring.make_transport = [](const std::string& host, absl::Duration step_timeout) {
    return std::make_unique<TcpRingTransport>(
        TcpTransportOptions{.host = host, .step_timeout = step_timeout});
  };
  ring.make_ranks = [host = ring.host, make = ring.make_transport](const TestRankOptions& options) {
    return MakeHostRanks(options, [&](int) { return make(host, options.step_timeout); });
  };
  return ring;
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

}  // namespace

std::vector<RingUnderTest> RingsUnderTest() { return {TcpRing()}; }

}  // namespace ringattn::worker
