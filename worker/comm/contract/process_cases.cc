// The contract of transports over sockets: ranks in separate processes, some of which are killed or
// stopped.
#include <signal.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "worker/comm/contract/forked_ring.h"
#include "worker/comm/contract/ring_fixture.h"

namespace ringattn::worker {
namespace {

class ProcessContract : public RingTest {
 protected:
  std::function<std::unique_ptr<RingTransport>()> Transports(absl::Duration step_timeout) const {
    return
        [ring = GetParam(), step_timeout] { return ring.make_transport(ring.host, step_timeout); };
  }
};

INSTANTIATE_TEST_SUITE_P(Rings, ProcessContract, ::testing::ValuesIn(RingsUnderTest()), RingName);

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

// Passes blocks around until a transfer fails. Returns 1 if the error is UNAVAILABLE and, if
// `names_peer`, names a rank, else 2.
std::function<int(Communicator&)> PassUntilLost(bool names_peer) {
  return [names_peer](Communicator& ring) {
    std::vector<uint8_t> mine(8 << 20), next(8 << 20);
    absl::Status status;
    while (status.ok()) status = PassBlock(ring, &mine, &next);
    const bool named = Message(status).find("rank ") != std::string::npos;
    return absl::IsUnavailable(status) && (named || !names_peer) ? 1 : 2;
  };
}

TEST_P(ProcessContract, SeparateProcessesPassBlocks) {
  for (int world_size : {2, 5, 8}) {
    ForkedRing ring(world_size, Transports(absl::Minutes(1)), [](Communicator& communicator) {
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

TEST_P(ProcessContract, KilledPeerEndsNeighboursAtOnce) {
  ForkedRing ring(4, Transports(absl::Minutes(10)), PassUntilLost(GetParam().isolates_peers));
  absl::SleepFor(absl::Milliseconds(200));
  const absl::Time begin = absl::Now();
  ring.Signal(2, SIGKILL);
  for (int rank : {0, 1, 3}) EXPECT_EQ(ring.Join(rank), 1) << rank;
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
}

// Rank 2 of a ring of three sends until it is killed. Rank 0 receives from it, in groups that also
// exchange with rank 1. Once rank 2 is lost, the exchange of the two still works.
int ExchangeWithoutRank2(Communicator& ring) {
  constexpr int64_t kBytes = 40 << 20;
  std::vector<uint8_t> block = Pattern(kBytes, ring.rank()), other(kBytes), third(kBytes);
  RunControl control;
  const auto run = [&](std::vector<PeerTransfer> group) {
    return ring.Start(std::move(group), {}, &control)->Wait(Soon());
  };
  using Kind = PeerTransfer::Kind;
  if (ring.rank() == 2) {
    while (run({{Kind::kSend, 0, block.data(), kBytes}}).ok()) {
    }
    return 3;
  }
  const int peer = 1 - ring.rank();
  const auto exchange = [&](std::vector<PeerTransfer> group) {
    std::fill(other.begin(), other.end(), 0);
    group.push_back({Kind::kSend, peer, block.data(), kBytes});
    group.push_back({Kind::kReceive, peer, other.data(), kBytes});
    return run(std::move(group));
  };
  bool lost = false;
  for (int round = 0, after = 0; after < 5; ++round) {
    // Both ranks do the same number of exchanges: rank 0 announces the last ones by its first byte.
    block[0] = lost ? 1 : 0;
    std::vector<PeerTransfer> group;
    if (ring.rank() == 0) group.push_back({Kind::kReceive, 2, third.data(), kBytes});
    const absl::Status status = exchange(group);
    if (ring.rank() == 0 && !status.ok()) {
      if (status.message().find("lost rank 2") == std::string::npos) return 1;
      lost = true;
    }
    if (ring.rank() == 1 && !status.ok()) return 2;
    std::vector<uint8_t> expected = Pattern(kBytes, peer);
    expected[0] = other[0];
    if (other != expected) return 4;
    after += ring.rank() == 0 ? (block[0] == 1 ? 1 : 0) : (other[0] == 1 ? 1 : 0);
  }
  return 0;
}

TEST_P(ProcessContract, SurvivorsContinue) {
  if (!GetParam().isolates_peers) GTEST_SKIP() << "a lost peer ends everything";
  ForkedRing ring(3, Transports(absl::Minutes(10)), ExchangeWithoutRank2);
  absl::SleepFor(absl::Milliseconds(500));
  ring.Signal(2, SIGKILL);
  ring.DismissAfter(2);
  EXPECT_EQ(ring.Join(0), 0);
  EXPECT_EQ(ring.Join(1), 0);
}

TEST_P(ProcessContract, StoppedPeerEndsOthersAtStepTimeout) {
  ForkedRing ring(3, Transports(absl::Seconds(1)), PassUntilLost(GetParam().isolates_peers));
  absl::SleepFor(absl::Milliseconds(200));
  const absl::Time begin = absl::Now();
  ring.Signal(0, SIGSTOP);
  for (int rank : {1, 2}) EXPECT_EQ(ring.Join(rank), 1) << rank;
  EXPECT_LT(absl::Now() - begin, absl::Seconds(8));
}

}  // namespace
}  // namespace ringattn::worker
