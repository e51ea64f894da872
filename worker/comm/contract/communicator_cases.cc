// The contract of Communicator: order, sizes, waiting, abort and destruction.
#include <atomic>
#include <cstdio>
#include <thread>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/contract/ring_fixture.h"
#include "worker/device/host_event.h"

namespace ringattn::worker {
namespace {

using Kind = PeerTransfer::Kind;
using ::testing::HasSubstr;

class RingOfOne : public RingTest {
 protected:
  void SetUp() override {
    if (GetParam().max_world_size < 1) GTEST_SKIP() << "needs a device";
  }
};
class CommunicatorContract : public RingOfManyTest {};

INSTANTIATE_TEST_SUITE_P(Rings, RingOfOne, ::testing::ValuesIn(RingsUnderTest()), RingName);
INSTANTIATE_TEST_SUITE_P(Rings, CommunicatorContract, ::testing::ValuesIn(RingsOfMany()), RingName);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CommunicatorContract);

TEST_P(RingOfOne, EmptyGroupIsDone) {
  Ranks ranks = MakeRanks(1);
  Ring ring = ranks.Form(1);
  ASSERT_TRUE(Formed(ring));
  EXPECT_EQ(ring[0]->rank(), 0);
  EXPECT_EQ(ring[0]->world_size(), 1);
  RunControl control;
  EXPECT_TRUE(ring[0]->Start({}, {}, &control)->Wait(Soon()).ok());
}

TEST_P(RingOfOne, EmptyGroupsFailAfterAbort) {
  Ranks ranks = MakeRanks(1);
  Ring ring = ranks.Form(1);
  ASSERT_TRUE(Formed(ring));
  ring[0]->Abort("torn down");
  ring[0]->Abort("again");
  RunControl control;
  const absl::Status status = ring[0]->Start({}, {}, &control)->Wait(Soon());
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(Message(status), HasSubstr("torn down"));
}

TEST_P(RingOfOne, CopiesSendsToItself) {
  if (!GetParam().sends_to_itself) GTEST_SKIP() << "peers are other ranks";
  Ranks ranks = MakeRanks(1);
  Ring ring = ranks.Form(1);
  ASSERT_TRUE(Formed(ring));
  RunControl control;
  Memory a(ranks[0], Pattern(1000, 4)), b(ranks[0], 1000);
  EventRef done = ring[0]->Start(
      {{Kind::kReceive, 0, b.data(), 1000}, {Kind::kSend, 0, a.data(), 1000}}, {}, &control);
  ASSERT_TRUE(done->Wait(Soon()).ok()) << done->Wait(Soon());
  EXPECT_EQ(b.Read(), Pattern(1000, 4));
}

// Each rank sends `bytes` to its right neighbour and receives from its left one.
void PassOneBlock(Ranks& ranks, Ring& ring, int64_t bytes) {
  const int world_size = ranks.size();
  std::vector<RunControl> controls(world_size);
  std::vector<MemoryRef> sent, received;
  for (int rank = 0; rank < world_size; ++rank) {
    sent.push_back(std::make_unique<Memory>(ranks[rank], Pattern(bytes, rank)));
    received.push_back(std::make_unique<Memory>(ranks[rank], bytes));
  }
  std::vector<EventRef> done;
  for (int rank = 0; rank < world_size; ++rank) {
    const int right = (rank + 1) % world_size, left = (rank + world_size - 1) % world_size;
    done.push_back(ring[rank]->Start({{Kind::kSend, right, sent[rank]->data(), bytes},
                                      {Kind::kReceive, left, received[rank]->data(), bytes}},
                                     {}, &controls[rank]));
  }
  for (int rank = 0; rank < world_size; ++rank) {
    ASSERT_TRUE(done[rank]->Wait(Soon()).ok()) << done[rank]->Wait(Soon());
    EXPECT_LE(done[rank]->begin_time(), done[rank]->end_time());
    EXPECT_GE(controls[rank].progress.load(), 2);
    EXPECT_TRUE(received[rank]->Read() == Pattern(bytes, (rank + world_size - 1) % world_size))
        << bytes;
  }
}

TEST_P(CommunicatorContract, PassesBlocksOfEverySize) {
  for (int world_size : WorldSizes({2, 3, 4, 8})) {
    Ranks ranks = MakeRanks(world_size);
    Ring ring = ranks.Form(1);
    ASSERT_TRUE(Formed(ring));
    // The last size needs several of TCP's segments when there are two ranks.
    for (int64_t bytes :
         {int64_t{0}, int64_t{1}, int64_t{4097}, (int64_t{40} << 20) / world_size + 3}) {
      PassOneBlock(ranks, ring, bytes);
    }
  }
}

TEST_P(CommunicatorContract, OneGroupReachesAllPeersInBothDirections) {
  constexpr int64_t kBytes = 300'000;
  const int world_size = LargestWorld(5);
  Ranks ranks = MakeRanks(world_size);
  Ring ring = ranks.Form(7);
  ASSERT_TRUE(Formed(ring));
  std::vector<RunControl> controls(world_size);
  std::vector<MemoryRef> sent, received;
  std::vector<EventRef> done;
  for (int rank = 0; rank < world_size; ++rank) {
    sent.push_back(std::make_unique<Memory>(ranks[rank], Pattern(kBytes, rank)));
    received.push_back(std::make_unique<Memory>(ranks[rank], kBytes * world_size));
  }
  const auto reaches = [&](int rank, int peer) {
    return peer != rank || GetParam().sends_to_itself;
  };
  for (int rank = 0; rank < world_size; ++rank) {
    std::vector<PeerTransfer> group;
    // Some ranks list receives first, others last: the order within a group must not matter between
    // different peers.
    for (int peer = 0; peer < world_size; ++peer) {
      if (!reaches(rank, peer)) continue;
      PeerTransfer send{Kind::kSend, peer, sent[rank]->data(), kBytes};
      PeerTransfer receive{Kind::kReceive, peer, received[rank]->data() + peer * kBytes, kBytes};
      group.push_back(rank % 2 == 0 ? send : receive);
      group.push_back(rank % 2 == 0 ? receive : send);
    }
    done.push_back(ring[rank]->Start(group, {}, &controls[rank]));
  }
  for (int rank = 0; rank < world_size; ++rank) {
    ASSERT_TRUE(done[rank]->Wait(Soon()).ok()) << done[rank]->Wait(Soon());
    EXPECT_EQ(controls[rank].progress.load(),
              2 * (world_size - (GetParam().sends_to_itself ? 0 : 1)));
    const std::vector<uint8_t> all = received[rank]->Read();
    for (int peer = 0; peer < world_size; ++peer) {
      if (!reaches(rank, peer)) continue;
      EXPECT_TRUE(std::equal(all.begin() + peer * kBytes, all.begin() + (peer + 1) * kBytes,
                             Pattern(kBytes, peer).begin()));
    }
  }
}

TEST_P(CommunicatorContract, NthSendMatchesNthReceive) {
  Ranks ranks = MakeRanks(2);
  Ring ring = ranks.Form(1);
  ASSERT_TRUE(Formed(ring));
  RunControl controls[2];
  constexpr int kCount = 60;
  // All messages have one size, so only the order distinguishes them. The sender puts three into a
  // group, the receiver two.
  const std::vector<uint8_t> numbers = Pattern(kCount * 8, 3);
  Memory sent(ranks[0], numbers), received(ranks[1], kCount * 8);
  std::vector<EventRef> done;
  for (int i = 0; i < kCount; i += 3) {
    std::vector<PeerTransfer> group;
    for (int j = i; j < i + 3; ++j) group.push_back({Kind::kSend, 1, sent.data() + j * 8, 8});
    done.push_back(ring[0]->Start(group, {}, &controls[0]));
  }
  for (int i = 0; i < kCount; i += 2) {
    std::vector<PeerTransfer> group;
    for (int j = i; j < i + 2; ++j) {
      group.push_back({Kind::kReceive, 0, received.data() + j * 8, 8});
    }
    done.push_back(ring[1]->Start(group, {}, &controls[1]));
  }
  for (const EventRef& event : done) ASSERT_TRUE(event->Wait(Soon()).ok());
  EXPECT_EQ(received.Read(), numbers);
}

TEST_P(CommunicatorContract, SomeMembersMayExchangeWithoutOthers) {
  const int world_size = LargestWorld(4);
  if (world_size < 3) GTEST_SKIP() << "needs three devices";
  Ranks ranks = MakeRanks(world_size);
  Ring ring = ranks.Form(1);
  ASSERT_TRUE(Formed(ring));
  RunControl controls[2];
  const int a = world_size - 1, b = 1;
  Memory sent(ranks[a], Pattern(5000, 1)), received(ranks[b], 5000);
  EventRef send = ring[a]->Start({{Kind::kSend, b, sent.data(), 5000}}, {}, &controls[0]);
  EventRef receive = ring[b]->Start({{Kind::kReceive, a, received.data(), 5000}}, {}, &controls[1]);
  ASSERT_TRUE(send->Wait(Soon()).ok());
  ASSERT_TRUE(receive->Wait(Soon()).ok());
  EXPECT_EQ(received.Read(), Pattern(5000, 1));
}

TEST_P(CommunicatorContract, GroupWaitsForItsDependencies) {
  constexpr int64_t kBytes = 1 << 20;
  Ranks ranks = MakeRanks(2);
  Ring ring = ranks.Form(1);
  ASSERT_TRUE(Formed(ring));
  RunControl controls[2];
  Memory sent(ranks[0], kBytes), received(ranks[1], kBytes);
  std::atomic<bool> go{false};
  EventRef computed = ranks[0]->FillWhen(&go, sent.data(), kBytes, 7);
  EventRef send = ring[0]->Start({{Kind::kSend, 1, sent.data(), kBytes}}, {computed}, &controls[0]);
  EventRef receive =
      ring[1]->Start({{Kind::kReceive, 0, received.data(), kBytes}}, {}, &controls[1]);
  EXPECT_FALSE(receive->Wait(absl::Now() + absl::Milliseconds(100)).ok());
  EXPECT_FALSE(send->Done());
  go = true;
  ASSERT_TRUE(receive->Wait(Soon()).ok());
  ASSERT_TRUE(send->Wait(Soon()).ok());
  EXPECT_EQ(received.Read(), std::vector<uint8_t>(kBytes, 7));
}

TEST_P(CommunicatorContract, GroupRunsAfterFailedDependency) {
  Ranks ranks = MakeRanks(2);
  Ring ring = ranks.Form(1);
  ASSERT_TRUE(Formed(ring));
  RunControl controls[2];
  auto failed = std::make_shared<HostEvent>();
  failed->Finish(absl::InternalError("kernel"));
  Memory a(ranks[0], Pattern(4, 9)), b(ranks[1], 4);
  EventRef send = ring[0]->Start({{Kind::kSend, 1, a.data(), 4}}, {failed}, &controls[0]);
  EventRef receive = ring[1]->Start({{Kind::kReceive, 0, b.data(), 4}}, {}, &controls[1]);
  EXPECT_TRUE(receive->Wait(Soon()).ok());
  EXPECT_TRUE(send->Wait(Soon()).ok());
  EXPECT_EQ(b.Read(), Pattern(4, 9));
}

// Each group forwards a block that the previous group received, as in a ring pass, without waiting
// in between. Prints how long Start blocks the caller and how long a small step takes.
TEST_P(CommunicatorContract, ManyGroupsForwardTheSameBytes) {
  constexpr int kGroups = 500, kBytes = 4096;
  const int world_size = LargestWorld(4);
  Ranks ranks = MakeRanks(world_size);
  Ring ring = ranks.Form(1);
  ASSERT_TRUE(Formed(ring));
  std::vector<RunControl> controls(world_size);
  std::vector<double> enqueue_us(world_size), step_us(world_size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      const int right = (rank + 1) % world_size, left = (rank + world_size - 1) % world_size;
      Memory blocks(ranks[rank], int64_t{kBytes} * (kGroups + 1));
      const std::vector<uint8_t> own = Pattern(kBytes, rank);
      ranks[rank]->Write(blocks.data(), own.data(), kBytes);
      const absl::Time begin = absl::Now();
      std::vector<EventRef> done;
      for (int i = 0; i < kGroups; ++i) {
        std::vector<EventRef> after;
        if (i > 0) after.push_back(done.back());
        done.push_back(ring[rank]->Start(
            {{Kind::kSend, right, blocks.data() + int64_t{i} * kBytes, kBytes},
             {Kind::kReceive, left, blocks.data() + int64_t{i + 1} * kBytes, kBytes}},
            std::move(after), &controls[rank]));
      }
      enqueue_us[rank] = absl::ToDoubleMicroseconds(absl::Now() - begin) / kGroups;
      // Waits for all events, because an event may use its control until its end has been observed.
      for (const EventRef& event : done) EXPECT_TRUE(event->Wait(Soon()).ok());
      step_us[rank] = absl::ToDoubleMicroseconds(absl::Now() - begin) / kGroups;
      const int source = ((rank - kGroups) % world_size + world_size) % world_size;
      const std::vector<uint8_t> all = blocks.Read();
      EXPECT_TRUE(std::equal(all.end() - kBytes, all.end(), Pattern(kBytes, source).begin()));
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::printf("small groups: Start takes %.0f us, a step %.0f us (slowest rank of %d)\n",
              *std::max_element(enqueue_us.begin(), enqueue_us.end()),
              *std::max_element(step_us.begin(), step_us.end()), world_size);
}

TEST_P(CommunicatorContract, ReformsAfterAbortDuringTransfer) {
  const int64_t bytes = GetParam().long_transfer_bytes;
  Ranks ranks = MakeRanks(2);
  Memory a(ranks[0], bytes), b(ranks[1], bytes);
  for (uint64_t generation = 1; generation <= 4; ++generation) {
    Ring ring = ranks.Form(generation);
    ASSERT_TRUE(Formed(ring));
    RunControl controls[2];
    EventRef first = ring[0]->Start({{Kind::kSend, 1, a.data(), bytes}}, {}, &controls[0]);
    EventRef second = ring[0]->Start({{Kind::kSend, 1, a.data(), bytes}}, {}, &controls[0]);
    EventRef other = ring[1]->Start({{Kind::kReceive, 0, b.data(), bytes}}, {}, &controls[1]);
    // The second send has no receiver, so there is always something to abort.
    const absl::Time begin = absl::Now();
    ring[0]->Abort("rank 1 was lost");
    ring[1]->Abort("rank 0 was lost");
    const absl::Status status = second->Wait(begin + kAbortBound);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_THAT(Message(status), HasSubstr("rank 1 was lost"));
    EXPECT_NE(first->Wait(begin + kAbortBound).code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_NE(other->Wait(begin + kAbortBound).code(), absl::StatusCode::kDeadlineExceeded);
    for (const int64_t later_bytes : {int64_t{4}, int64_t{0}}) {
      EventRef later = ring[0]->Start({{Kind::kSend, 1, a.data(), later_bytes}}, {}, &controls[0]);
      EXPECT_EQ(later->Wait(begin + kAbortBound).code(), absl::StatusCode::kUnavailable);
    }
    std::printf("abort %d: %.1f ms\n", static_cast<int>(generation),
                absl::ToDoubleMilliseconds(absl::Now() - begin));
  }
}

TEST_P(CommunicatorContract, AbortEndsUnmatchedReceive) {
  const int world_size = LargestWorld(3);
  Ranks ranks = MakeRanks(world_size);
  Ring ring = ranks.Form(1);
  ASSERT_TRUE(Formed(ring));
  RunControl control;
  const int last = world_size - 1;
  Memory a(ranks[last], 4);
  EventRef receive = ring[last]->Start({{Kind::kReceive, 0, a.data(), 4}}, {}, &control);
  EventRef behind = ring[last]->Start({{Kind::kSend, 0, a.data(), 4}}, {}, &control);
  EXPECT_FALSE(receive->Wait(absl::Now() + absl::Milliseconds(50)).ok());
  const absl::Time begin = absl::Now();
  ring[last]->Abort("torn down");
  EXPECT_EQ(receive->Wait(begin + kAbortBound).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(behind->Wait(begin + kAbortBound).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(control.progress.load(), 0);
}

TEST_P(CommunicatorContract, DestructionEndsPendingGroups) {
  Ranks ranks = MakeRanks(2);
  Ring ring = ranks.Form(1);
  ASSERT_TRUE(Formed(ring));
  RunControl control;
  Memory a(ranks[1], 4);
  EventRef receive = ring[1]->Start({{Kind::kReceive, 0, a.data(), 4}}, {}, &control);
  ring[1] = nullptr;
  EXPECT_EQ(receive->Wait(absl::Now() + kAbortBound).code(), absl::StatusCode::kUnavailable);
}

TEST_P(CommunicatorContract, StepTimeoutNamesThePeer) {
  if (!GetParam().has_step_timeout) GTEST_SKIP() << "it has no step timeout";
  Ranks ranks = MakeRanks(2, absl::Milliseconds(300));
  Ring ring = ranks.Form(1);
  ASSERT_TRUE(Formed(ring));
  RunControl control;
  Memory a(ranks[1], 4);
  EventRef receive = ring[1]->Start({{Kind::kReceive, 0, a.data(), 4}}, {}, &control);
  const absl::Status status = receive->Wait(absl::Now() + kAbortBound);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(Message(status), HasSubstr("receiving from rank 0 took longer than 300ms"));
  std::vector<PeerTransfer> later;
  if (GetParam().isolates_peers) later.push_back({Kind::kReceive, 0, a.data(), 4});
  EXPECT_EQ(ring[1]->Start(later, {}, &control)->Wait(Soon()).code(),
            absl::StatusCode::kUnavailable);
}

// A peer that does not answer, as of a host without power.
TEST_P(CommunicatorContract, LosePeerEndsItsTransfers) {
  constexpr int64_t kBytes = 3 << 20;
  const int world_size = LargestWorld(3), lost = world_size - 1;
  Ranks ranks = MakeRanks(world_size);
  Ring ring = ranks.Form(1);
  ASSERT_TRUE(Formed(ring));
  RunControl controls[2];
  Memory a(ranks[0], Pattern(kBytes, 1)), b(ranks[1], kBytes), c(ranks[0], kBytes);
  EventRef receive = ring[0]->Start({{Kind::kReceive, lost, c.data(), kBytes}}, {}, &controls[0]);
  EXPECT_FALSE(receive->Wait(absl::Now() + absl::Milliseconds(50)).ok());
  const absl::Time begin = absl::Now();
  ring[0]->LosePeer(lost, "it is silent");
  ring[0]->LosePeer(lost, "again");
  const absl::Status status = receive->Wait(begin + kAbortBound);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(Message(status), HasSubstr("it is silent"));
  EXPECT_EQ(ring[0]
                ->Start({{Kind::kSend, lost, a.data(), kBytes}}, {}, &controls[0])
                ->Wait(absl::Now() + kAbortBound)
                .code(),
            absl::StatusCode::kUnavailable);
  if (!GetParam().isolates_peers || world_size < 3) return;
  EXPECT_THAT(Message(status), HasSubstr("lost rank 2: "));
  for (int round = 0; round < 3; ++round) {
    EventRef send = ring[0]->Start({{Kind::kSend, 1, a.data(), kBytes}}, {}, &controls[0]);
    EventRef taken = ring[1]->Start({{Kind::kReceive, 0, b.data(), kBytes}}, {}, &controls[1]);
    EXPECT_TRUE(send->Wait(Soon()).ok()) << send->Wait(Soon());
    EXPECT_TRUE(taken->Wait(Soon()).ok()) << taken->Wait(Soon());
  }
  EXPECT_TRUE(b.Read() == Pattern(kBytes, 1));
}

// A group that waits for its peer in one lane does not hold up the other lane.
TEST_P(CommunicatorContract, LanesAreIndependent) {
  if (LargestWorld(3) < 3) GTEST_SKIP() << "needs three ranks";
  constexpr int64_t kBytes = 3 << 20;
  Ranks ranks = MakeRanks(3);
  Ring ring = ranks.Form(1);
  ASSERT_TRUE(Formed(ring));
  if (!ring[0]->has_lanes()) GTEST_SKIP() << "groups of all lanes have one order";
  RunControl controls[3];
  Memory a(ranks[0], Pattern(kBytes, 1)), b(ranks[1], kBytes);
  Memory c(ranks[2], Pattern(kBytes, 2)), d(ranks[0], kBytes);
  for (const Lane waiting : kAllLanes) {
    const Lane other = waiting == Lane::kInside ? Lane::kBetween : Lane::kInside;
    // NCCL moves the transfers of both lanes in one order. Inside a host, copy engines do.
    if (ring[0]->transport(1) == "nccl" && ring[0]->transport(2) == "nccl") break;
    EventRef later =
        ring[0]->StartInLane(waiting, {{Kind::kReceive, 2, d.data(), kBytes}}, {}, &controls[0]);
    for (int round = 0; round < 3; ++round) {
      EventRef send =
          ring[0]->StartInLane(other, {{Kind::kSend, 1, a.data(), kBytes}}, {}, &controls[0]);
      EventRef receive = ring[1]->Start({{Kind::kReceive, 0, b.data(), kBytes}}, {}, &controls[1]);
      EXPECT_TRUE(send->Wait(Soon()).ok()) << send->Wait(Soon());
      EXPECT_TRUE(receive->Wait(Soon()).ok()) << receive->Wait(Soon());
    }
    EXPECT_FALSE(later->Done());
    EXPECT_TRUE(b.Read() == Pattern(kBytes, 1));
    // The other way round: the first lane's group ends while the second lane's waits.
    EventRef last =
        ring[0]->StartInLane(other, {{Kind::kSend, 1, a.data(), kBytes}}, {}, &controls[0]);
    EventRef sent = ring[2]->Start({{Kind::kSend, 0, c.data(), kBytes}}, {}, &controls[2]);
    EXPECT_TRUE(later->Wait(Soon()).ok()) << later->Wait(Soon());
    EXPECT_TRUE(sent->Wait(Soon()).ok()) << sent->Wait(Soon());
    EXPECT_TRUE(d.Read() == Pattern(kBytes, 2));
    EventRef taken = ring[1]->Start({{Kind::kReceive, 0, b.data(), kBytes}}, {}, &controls[1]);
    EXPECT_TRUE(last->Wait(Soon()).ok()) << last->Wait(Soon());
    EXPECT_TRUE(taken->Wait(Soon()).ok()) << taken->Wait(Soon());
  }
}

TEST_P(CommunicatorContract, AbortEndsBothLanes) {
  if (LargestWorld(3) < 3) GTEST_SKIP() << "needs three ranks";
  Ranks ranks = MakeRanks(3);
  Ring ring = ranks.Form(1);
  ASSERT_TRUE(Formed(ring));
  RunControl control;
  Memory a(ranks[0], 4), b(ranks[0], 4);
  const EventRef pending[] = {
      ring[0]->StartInLane(Lane::kInside, {{Kind::kReceive, 1, a.data(), 4}}, {}, &control),
      ring[0]->StartInLane(Lane::kBetween, {{Kind::kReceive, 2, b.data(), 4}}, {}, &control)};
  absl::SleepFor(absl::Milliseconds(50));
  ring[0]->Abort("torn down");
  for (const EventRef& event : pending) {
    const absl::Status status = event->Wait(absl::Now() + kAbortBound);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_THAT(Message(status), HasSubstr("torn down"));
  }
}

TEST_P(CommunicatorContract, LostPeerEndsOnlyItsTransfers) {
  if (!GetParam().isolates_peers) GTEST_SKIP() << "a lost peer ends everything";
  if (LargestWorld(3) < 3) GTEST_SKIP() << "needs three ranks";
  constexpr int64_t kBytes = 3 << 20;
  Ranks ranks = MakeRanks(3);
  Ring ring = ranks.Form(1);
  ASSERT_TRUE(Formed(ring));
  RunControl controls[2];
  Memory a(ranks[0], Pattern(kBytes, 1)), b(ranks[1], kBytes), c(ranks[0], kBytes);
  EventRef broken =
      ring[0]->Start({{Kind::kReceive, 2, c.data(), kBytes}, {Kind::kSend, 1, a.data(), kBytes}},
                     {}, &controls[0]);
  EventRef whole = ring[1]->Start({{Kind::kReceive, 0, b.data(), kBytes}}, {}, &controls[1]);
  ring[2] = nullptr;
  EXPECT_TRUE(whole->Wait(Soon()).ok()) << whole->Wait(Soon());
  EXPECT_TRUE(b.Read() == Pattern(kBytes, 1));
  const absl::Status status = broken->Wait(absl::Now() + kAbortBound);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Message(status), HasSubstr("lost rank 2: the peer "));
  // Later groups with other peers work; those with the lost one fail at once.
  EXPECT_EQ(ring[0]
                ->Start({{Kind::kSend, 2, a.data(), kBytes}}, {}, &controls[0])
                ->Wait(absl::Now() + kAbortBound)
                .code(),
            absl::StatusCode::kUnavailable);
  for (int round = 0; round < 3; ++round) {
    EventRef send = ring[0]->Start({{Kind::kSend, 1, a.data(), kBytes}}, {}, &controls[0]);
    EventRef receive = ring[1]->Start({{Kind::kReceive, 0, b.data(), kBytes}}, {}, &controls[1]);
    EXPECT_TRUE(send->Wait(Soon()).ok()) << send->Wait(Soon());
    EXPECT_TRUE(receive->Wait(Soon()).ok()) << receive->Wait(Soon());
  }
}

}  // namespace
}  // namespace ringattn::worker
