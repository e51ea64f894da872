// Rings of separate processes beyond the contract (worker/comm/contract/process_cases.cc).
#include <signal.h>

#include <memory>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "worker/comm/contract/forked_ring.h"
#include "worker/comm/contract/ring_fixture.h"
#include "worker/comm/wire/wire_ring_transport.h"

namespace ringattn::worker {
namespace {

// The survivors of a killed rank continue to exchange with each other.
TEST(WireRingProcesses, SurvivorsContinue) {
  const auto make_transport = [] {
    return std::make_unique<WireRingTransport>(WireTransportOptions{.connections = 3});
  };
  ForkedRing ring(3, make_transport, [](Communicator& communicator) {
    if (communicator.rank() == 2) {
      std::vector<uint8_t> block(8 << 20);
      RunControl control;
      while (true) {
        EventRef done = communicator.Start({{PeerTransfer::Kind::kSend, 0, block.data(), 8 << 20}},
                                           {}, &control);
        if (!done->Wait(Soon()).ok()) return 3;
      }
    }
    std::vector<uint8_t> block(8 << 20), other(8 << 20);
    RunControl control;
    const auto with = [&](int peer) {
      EventRef done = communicator.Start(
          {{PeerTransfer::Kind::kReceive, peer, other.data(), 8 << 20}}, {}, &control);
      return done->Wait(Soon());
    };
    if (communicator.rank() == 0) {
      absl::Status status;
      while (status.ok()) status = with(2);
      if (status.message().find("lost rank 2") == std::string::npos) return 1;
    }
    const int peer = 1 - communicator.rank();
    for (int round = 0; round < 10; ++round) {
      EventRef done =
          communicator.Start({{PeerTransfer::Kind::kSend, peer, block.data(), 8 << 20},
                              {PeerTransfer::Kind::kReceive, peer, other.data(), 8 << 20}},
                             {}, &control);
      if (!done->Wait(Soon()).ok()) return 2;
    }
    return 0;
  });
  absl::SleepFor(absl::Milliseconds(300));
  ring.Signal(2, SIGKILL);
  ring.DismissAfter(2);
  EXPECT_EQ(ring.Join(0), 0);
  EXPECT_EQ(ring.Join(1), 0);
}

}  // namespace
}  // namespace ringattn::worker
