#include "worker/comm/tcp/tcp_ring_transport.h"

#include <numeric>
#include <thread>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/device/host_event.h"

namespace ringattn::worker {
namespace {

using Kind = PeerTransfer::Kind;
using Ring = std::vector<std::unique_ptr<Communicator>>;

absl::Time Soon() { return absl::Now() + absl::Seconds(20); }

// One transport per rank, as in separate processes; they may form several rings.
struct Transports {
  std::vector<std::unique_ptr<TcpRingTransport>> ranks;

  explicit Transports(int world_size, absl::Duration step_timeout = absl::Minutes(1)) {
    for (int rank = 0; rank < world_size; ++rank) {
      ranks.push_back(
          std::make_unique<TcpRingTransport>(TcpTransportOptions{.step_timeout = step_timeout}));
    }
  }

  Ring Form(uint64_t generation) {
    const int world_size = ranks.size();
    std::vector<std::string> blobs;
    for (int rank = 0; rank < world_size; ++rank) {
      auto blob = ranks[rank]->Prepare(generation, rank, world_size);
      EXPECT_TRUE(blob.ok()) << blob.status();
      blobs.push_back(*blob);
    }
    Ring ring(world_size);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < world_size; ++rank) {
      threads.emplace_back([&, rank] {
        auto communicator = ranks[rank]->Connect(generation, blobs, Soon());
        EXPECT_TRUE(communicator.ok()) << communicator.status();
        if (communicator.ok()) ring[rank] = *std::move(communicator);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return ring;
  }
};

std::vector<uint8_t> Pattern(int64_t bytes, int seed) {
  std::vector<uint8_t> data(bytes);
  for (int64_t i = 0; i < bytes; ++i) data[i] = static_cast<uint8_t>(i * 31 + seed + (i >> 13));
  return data;
}

TEST(TcpRing, PassesBlocksOfEverySizeAroundTheRing) {
  for (int world_size : {2, 3, 4, 8}) {
    Transports transports(world_size);
    Ring ring = transports.Form(1);
    for (int64_t bytes :
         {int64_t{0}, int64_t{1}, int64_t{4097}, (int64_t{64} << 20) / world_size + 3}) {
      std::vector<RunControl> controls(world_size);
      std::vector<std::vector<uint8_t>> sent(world_size), received(world_size);
      std::vector<EventRef> done;
      for (int rank = 0; rank < world_size; ++rank) {
        sent[rank] = Pattern(bytes, rank);
        received[rank].assign(bytes, 0xee);
        done.push_back(ring[rank]->Start(
            {{Kind::kSend, (rank + 1) % world_size, sent[rank].data(), bytes},
             {Kind::kReceive, (rank + world_size - 1) % world_size, received[rank].data(), bytes}},
            {}, &controls[rank]));
      }
      for (int rank = 0; rank < world_size; ++rank) {
        ASSERT_TRUE(done[rank]->Wait(Soon()).ok()) << done[rank]->Wait(Soon());
        EXPECT_TRUE(received[rank] == sent[(rank + world_size - 1) % world_size]) << bytes;
        EXPECT_GE(controls[rank].progress.load(), 2);
      }
    }
  }
}

TEST(TcpRing, OneGroupReachesAllPeersBothWays) {
  constexpr int kWorldSize = 5;
  constexpr int64_t kBytes = 300'000;
  Transports transports(kWorldSize);
  Ring ring = transports.Form(7);
  std::vector<RunControl> controls(kWorldSize);
  std::vector<std::vector<uint8_t>> sent(kWorldSize);
  std::vector<std::vector<std::vector<uint8_t>>> received(kWorldSize);
  std::vector<EventRef> done;
  for (int rank = 0; rank < kWorldSize; ++rank) {
    sent[rank] = Pattern(kBytes, rank);
    received[rank].assign(kWorldSize, std::vector<uint8_t>(kBytes));
    std::vector<PeerTransfer> group;
    // Receives first in some ranks and last in others: order inside a group between
    // different peers must not matter.
    for (int peer = 0; peer < kWorldSize; ++peer) {
      if (peer == rank) continue;
      PeerTransfer send{Kind::kSend, peer, sent[rank].data(), kBytes};
      PeerTransfer receive{Kind::kReceive, peer, received[rank][peer].data(), kBytes};
      group.push_back(rank % 2 == 0 ? send : receive);
      group.push_back(rank % 2 == 0 ? receive : send);
    }
    done.push_back(ring[rank]->Start(group, {}, &controls[rank]));
  }
  for (int rank = 0; rank < kWorldSize; ++rank) {
    ASSERT_TRUE(done[rank]->Wait(Soon()).ok());
    EXPECT_EQ(controls[rank].progress.load(), 2 * (kWorldSize - 1));
    for (int peer = 0; peer < kWorldSize; ++peer) {
      EXPECT_TRUE(peer == rank || received[rank][peer] == sent[peer]);
    }
  }
}

TEST(TcpRing, TheNthSendMeetsTheNthReceive) {
  Transports transports(2);
  Ring ring = transports.Form(1);
  RunControl controls[2];
  constexpr int kCount = 60;
  // Same size everywhere, so that only order tells them apart; the sender packs
  // them three to a group, the receiver two.
  std::vector<int64_t> sent(kCount), received(kCount, -1);
  std::iota(sent.begin(), sent.end(), 1000);
  std::vector<EventRef> done;
  for (int i = 0; i < kCount; i += 3) {
    std::vector<PeerTransfer> group;
    for (int j = i; j < i + 3; ++j) group.push_back({Kind::kSend, 1, &sent[j], 8});
    done.push_back(ring[0]->Start(group, {}, &controls[0]));
  }
  for (int i = 0; i < kCount; i += 2) {
    std::vector<PeerTransfer> group;
    for (int j = i; j < i + 2; ++j) group.push_back({Kind::kReceive, 0, &received[j], 8});
    done.push_back(ring[1]->Start(group, {}, &controls[1]));
  }
  for (const EventRef& event : done) ASSERT_TRUE(event->Wait(Soon()).ok());
  EXPECT_EQ(sent, received);
}

TEST(TcpRing, AGroupRunsThoughItsPredecessorFailed) {
  Transports transports(2);
  Ring ring = transports.Form(1);
  RunControl control;
  auto failed = std::make_shared<HostEvent>();
  failed->Finish(absl::InternalError("kernel"));
  int a = 7, b = 0;
  EventRef send = ring[0]->Start({{Kind::kSend, 1, &a, 4}}, {failed}, &control);
  EventRef receive = ring[1]->Start({{Kind::kReceive, 0, &b, 4}}, {}, &control);
  EXPECT_TRUE(receive->Wait(Soon()).ok());
  EXPECT_TRUE(send->Wait(Soon()).ok());
  EXPECT_EQ(b, 7);
}

TEST(TcpRing, AbortMidTransferEndsBothSidesAndTheRingFormsAnew) {
  constexpr int64_t kBytes = int64_t{64} << 20;
  Transports transports(2);
  for (uint64_t generation = 1; generation <= 5; ++generation) {
    Ring ring = transports.Form(generation);
    RunControl controls[2];
    std::vector<uint8_t> a = Pattern(kBytes, 1), b(kBytes);
    EventRef first = ring[0]->Start({{Kind::kSend, 1, a.data(), kBytes}}, {}, &controls[0]);
    EventRef second = ring[0]->Start({{Kind::kSend, 1, a.data(), kBytes}}, {}, &controls[0]);
    EventRef other = ring[1]->Start({{Kind::kReceive, 0, b.data(), kBytes}}, {}, &controls[1]);
    // The second send has no receiver, so there is always something to abort.
    absl::SleepFor(absl::Milliseconds(5 * generation));
    const absl::Time begin = absl::Now();
    ring[0]->Abort("rank 1 was lost");
    const absl::Status status = second->Wait(begin + absl::Seconds(1));
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(status.message(), testing::HasSubstr("rank 1 was lost"));
    EXPECT_TRUE(first->Done());
    // The peer learns of it, or had received everything before.
    EXPECT_NE(other->Wait(begin + absl::Seconds(1)).code(), absl::StatusCode::kDeadlineExceeded);
    EventRef later = ring[0]->Start({{Kind::kSend, 1, a.data(), 4}}, {}, &controls[0]);
    EXPECT_EQ(later->Wait(Soon()).code(), absl::StatusCode::kUnavailable);
  }
}

TEST(TcpRing, AbortEndsAReceiveThatNobodyAnswers) {
  Transports transports(3);
  Ring ring = transports.Form(1);
  RunControl control;
  int a = 0;
  EventRef receive = ring[2]->Start({{Kind::kReceive, 0, &a, 4}}, {}, &control);
  absl::SleepFor(absl::Milliseconds(20));
  const absl::Time begin = absl::Now();
  ring[2]->Abort("teardown");
  EXPECT_EQ(receive->Wait(Soon()).code(), absl::StatusCode::kUnavailable);
  EXPECT_LT(absl::Now() - begin, absl::Seconds(1));
}

TEST(TcpRing, AStepThatTakesTooLongNamesThePeer) {
  Transports transports(2, absl::Milliseconds(200));
  Ring ring = transports.Form(1);
  RunControl control;
  int a = 0;
  const absl::Time begin = absl::Now();
  EventRef receive = ring[1]->Start({{Kind::kReceive, 0, &a, 4}}, {}, &control);
  const absl::Status status = receive->Wait(Soon());
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(status.message(), testing::HasSubstr("receiving from rank 0 took longer"));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(2));
}

TEST(TcpRing, RanksThatDisagreeAboutASizeFailWithoutHarm) {
  Transports transports(2, absl::Milliseconds(300));
  Ring ring = transports.Form(1);
  RunControl control;
  int64_t a = 5, b = 6;
  EventRef send = ring[0]->Start({{Kind::kSend, 1, &a, 8}}, {}, &control);
  EventRef receive = ring[1]->Start({{Kind::kReceive, 0, &b, 4}}, {}, &control);
  EXPECT_EQ(send->Wait(Soon()).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(receive->Wait(Soon()).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(b, 6);
}

TEST(TcpRing, ConnectingToWhatIsGoneIsUnavailable) {
  Transports transports(2);
  std::vector<std::string> blobs = {*transports.ranks[0]->Prepare(1, 0, 2),
                                    *transports.ranks[1]->Prepare(1, 1, 2)};
  transports.ranks[1].reset();
  const absl::Time begin = absl::Now();
  auto communicator = transports.ranks[0]->Connect(1, blobs, absl::Now() + absl::Milliseconds(500));
  EXPECT_EQ(communicator.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_LT(absl::Now() - begin, absl::Seconds(2));
}

TEST(TcpRing, CancelEndsAConnect) {
  Transports transports(2);
  // Which side of a pair waits for the other is Gloo's choice: try both.
  for (int rank : {0, 1}) {
    std::vector<std::string> blobs = {*transports.ranks[0]->Prepare(1, 0, 2),
                                      *transports.ranks[1]->Prepare(1, 1, 2)};
    transports.ranks[1 - rank]->Cancel();
    std::thread canceller([&] {
      absl::SleepFor(absl::Milliseconds(100));
      transports.ranks[rank]->Cancel();
    });
    const absl::Time begin = absl::Now();
    auto communicator = transports.ranks[rank]->Connect(1, blobs, Soon());
    EXPECT_FALSE(communicator.ok());
    EXPECT_LT(absl::Now() - begin, absl::Seconds(2));
    canceller.join();
  }
}

TEST(TcpRing, BlobsAreChecked) {
  Transports transports(2);
  const std::string blob = *transports.ranks[0]->Prepare(3, 0, 2);
  for (const std::string& bad : {std::string(), std::string("\x01"), std::string("\xff\xffxx")}) {
    ASSERT_TRUE(transports.ranks[0]->Prepare(3, 0, 2).ok());
    EXPECT_EQ(transports.ranks[0]->Connect(3, {blob, bad}, Soon()).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
  ASSERT_TRUE(transports.ranks[0]->Prepare(3, 0, 2).ok());
  EXPECT_EQ(transports.ranks[0]->Connect(3, {blob}, Soon()).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(transports.ranks[0]->Connect(4, {blob, blob}, Soon()).status().code(),
            absl::StatusCode::kCancelled);
  EXPECT_EQ(transports.ranks[0]->Prepare(5, 2, 2).status().code(),
            absl::StatusCode::kInvalidArgument);
  TcpRingTransport nowhere({.host = "192.0.2.1"});
  EXPECT_EQ(nowhere.Prepare(1, 0, 2).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(TcpRing, ARingOfOneNeedsNoPeers) {
  Transports transports(1);
  Ring ring = transports.Form(1);
  ASSERT_NE(ring[0], nullptr);
  RunControl control;
  EXPECT_TRUE(ring[0]->Start({}, {}, &control)->Wait(Soon()).ok());
}

}  // namespace
}  // namespace ringattn::worker
