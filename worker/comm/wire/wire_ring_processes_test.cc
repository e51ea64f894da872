// Rings of separate processes over sockets, some of which are killed or stopped.
#include <signal.h>

#include <memory>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "worker/comm/contract/forked_ring.h"
#include "worker/comm/contract/ring_fixture.h"
#include "worker/comm/wire/wire_ring_transport.h"

namespace ringattn::worker {
namespace {

std::function<std::unique_ptr<RingTransport>()> WireTransports(absl::Duration step_timeout) {
  return [step_timeout] {
    return std::make_unique<WireRingTransport>(
        WireTransportOptions{.connections = 3, .step_timeout = step_timeout});
  };
}

absl::Status PassBlock(Communicator& ring, std::vector<uint8_t>* mine, std::vector<uint8_t>* next) {
  const int world_size = ring.world_size(), rank = ring.rank();
  RunControl control;
  const auto bytes = static_cast<int64_t>(mine->size());
  EventRef done = ring.Start(
      {{PeerTransfer::Kind::kSend, (rank + 1) % world_size, mine->data(), bytes},
       {PeerTransfer::Kind::kReceive, (rank + world_size - 1) % world_size, next->data(), bytes}},
      {}, &control);
  return done->Wait(Soon());
}

// Passes blocks around until a transfer fails. Returns 1 if the error is UNAVAILABLE and names a
// neighbour, else 2.
int PassUntilLost(Communicator& ring) {
  std::vector<uint8_t> mine(8 << 20), next(8 << 20);
  while (true) {
    const absl::Status status = PassBlock(ring, &mine, &next);
    if (status.ok()) continue;
    return absl::IsUnavailable(status) && status.message().find("rank ") != std::string::npos ? 1
                                                                                              : 2;
  }
}

TEST(WireRingProcesses, SeparateProcessesPassBlocks) {
  for (int world_size : {2, 5, 8}) {
    ForkedRing ring(world_size, WireTransports(absl::Minutes(1)), [](Communicator& communicator) {
      constexpr int64_t kBytes = 5'000'003;
      const int world_size = communicator.world_size(), rank = communicator.rank();
      std::vector<uint8_t> now = Pattern(kBytes, rank), next(kBytes);
      for (int step = 1; step < world_size; ++step) {
        if (!PassBlock(communicator, &now, &next).ok()) return 1;
        now.swap(next);
        if (now != Pattern(kBytes, (rank + world_size - step) % world_size)) return 2;
      }
      return 0;
    });
    ring.ExpectSuccess();
  }
}

TEST(WireRingProcesses, KilledPeerEndsNeighboursAtOnce) {
  ForkedRing ring(4, WireTransports(absl::Minutes(10)), PassUntilLost);
  absl::SleepFor(absl::Milliseconds(200));
  const absl::Time begin = absl::Now();
  ring.Signal(2, SIGKILL);
  for (int rank : {0, 1, 3}) EXPECT_EQ(ring.Join(rank), 1) << rank;
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
}

// The survivors of a killed rank continue to exchange with each other.
TEST(WireRingProcesses, SurvivorsContinue) {
  ForkedRing ring(3, WireTransports(absl::Minutes(1)), [](Communicator& communicator) {
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

TEST(WireRingProcesses, StoppedPeerEndsOthersAtStepTimeout) {
  ForkedRing ring(3, WireTransports(absl::Seconds(1)), PassUntilLost);
  absl::SleepFor(absl::Milliseconds(200));
  const absl::Time begin = absl::Now();
  ring.Signal(0, SIGSTOP);
  for (int rank : {1, 2}) EXPECT_EQ(ring.Join(rank), 1) << rank;
  EXPECT_LT(absl::Now() - begin, absl::Seconds(8));
}

}  // namespace
}  // namespace ringattn::worker
