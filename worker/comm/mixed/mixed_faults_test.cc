// Rings over two emulated hosts whose members, copy engines or network fail, with the fakes of CUDA
// and NCCL.
#include <atomic>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/contract/ring_fixture.h"
#include "worker/comm/mixed/emulated_hosts.h"
#include "worker/comm/mixed/mixed_ring_transport.h"
#include "worker/comm/nccl/nccl_ring_transport.h"
#include "worker/comm/single_rank/single_rank_transport.h"
#include "worker/comm/wire_cuda/wire_cuda_ranks.h"
#include "worker/testing/fake_cuda/fake_cuda.h"
#include "worker/testing/fake_cuda/fake_vmm.h"

namespace ringattn::worker {

// Required by the fixture; this program links none of the contract's cases.
std::vector<RingUnderTest> RingsUnderTest() { return {}; }

namespace {

using Kind = PeerTransfer::Kind;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kBytes = 4096;
constexpr absl::Duration kLittle = absl::Milliseconds(100);

enum class Network { kNccl, kWire, kWireTls };

// Ranks 0 and 1 are on one host and ranks 2 and 3 on another, unless Make is given other hosts.
// Parameterized by what moves the bytes between them.
class MixedFaults : public ::testing::TestWithParam<Network> {
 protected:
  void SetUp() override { Make({"a", "a", "b", "b"}); }

  bool uses_nccl() const { return GetParam() == Network::kNccl; }
  std::string network() const { return uses_nccl() ? "nccl" : "wire"; }

  void TearDown() override {
    ring_.clear();
    memory_.clear();
    Faults().abort_ms = 0;
    Faults().lost_network = false;
    Faults().refuse_sends = false;
    Faults().hold_copies = false;
    FakeVmm().refuse_access = false;
  }

  // `hosts`: by rank; empty: the rank does not share memory.
  void Make(const std::vector<std::string>& hosts, absl::Duration step_timeout = absl::Minutes(1)) {
    ring_.clear();
    memory_.clear();
    choices_.assign(hosts.size(), {});
    std::optional<TlsMaterial> tls;
    if (GetParam() == Network::kWireTls) tls = TestTlsMaterial();
    RingUnderTest ring;
    ring.make_ranks = [&](const TestRankOptions& options) {
      std::vector<std::unique_ptr<TestRank>> ranks;
      for (int rank = 0; rank < options.world_size; ++rank) {
        const auto note = [this, rank](const RingPaths& paths) {
          choices_[rank].push_back(paths.Islands());
        };
        ranks.push_back(MakeEmulatedRank({.device = rank,
                                          .host_id = hosts[rank],
                                          .nccl = uses_nccl(),
                                          .wire = !uses_nccl(),
                                          .tls = tls,
                                          .on_choice = note},
                                         options));
      }
      return ranks;
    };
    TestRankOptions options;
    options.world_size = static_cast<int>(hosts.size());
    options.step_timeout = step_timeout;
    ranks_ = std::make_unique<Ranks>(ring, options);
    for (int rank = 0; rank < ranks_->size(); ++rank) {
      memory_.push_back(std::make_unique<Memory>((*ranks_)[rank], Pattern(kBytes, rank)));
      memory_.push_back(std::make_unique<Memory>((*ranks_)[rank], kBytes));
    }
  }

  void Form(uint64_t generation) {
    ring_.clear();
    ring_ = ranks_->Form(generation);
    ASSERT_TRUE(Formed(ring_));
  }

  Memory& Sent(int rank) { return *memory_[2 * rank]; }
  Memory& Received(int rank) { return *memory_[2 * rank + 1]; }
  PeerTransfer Send(int rank, int to, int64_t bytes = kBytes) {
    return {Kind::kSend, to, Sent(rank).data(), bytes};
  }
  PeerTransfer Receive(int rank, int from, int64_t bytes = kBytes) {
    return {Kind::kReceive, from, Received(rank).data(), bytes};
  }
  EventRef Start(int rank, std::vector<PeerTransfer> group, std::vector<EventRef> after = {}) {
    return ring_[rank]->Start(std::move(group), std::move(after), &control_);
  }
  bool HasBytesOf(int rank, int from) { return Received(rank).Read() == Pattern(kBytes, from); }

  RunControl control_;
  std::vector<std::vector<std::string>> choices_;  // by rank, RingPaths::Islands of each Connect
  std::unique_ptr<Ranks> ranks_;
  std::vector<MemoryRef> memory_;
  Ring ring_;
};

TEST_P(MixedFaults, NamesTransportOfEachPeer) {
  Form(1);
  EXPECT_EQ(ring_[0]->transport(1), "peer");
  EXPECT_EQ(ring_[0]->transport(2), network());
  EXPECT_EQ(ring_[3]->transport(2), "peer");
  EXPECT_FALSE(ring_[0]->takes_compute_units(0));
  EXPECT_FALSE(ring_[0]->takes_compute_units(1));
  EXPECT_EQ(ring_[0]->takes_compute_units(3), uses_nccl());
  for (const auto& choices : choices_) EXPECT_THAT(choices, ElementsAre("0-1 2-3"));

  Make({"a", "b", "b", ""});
  Form(1);
  EXPECT_EQ(ring_[0]->transport(1), network());
  EXPECT_EQ(ring_[1]->transport(2), "peer");
  EXPECT_EQ(ring_[3]->transport(2), network());
  for (const auto& choices : choices_) EXPECT_THAT(choices, ElementsAre("0 1-2 3"));

  Make({"a", "a"});
  Form(1);
  EXPECT_EQ(ring_[0]->transport(1), "peer");
  Make({"a", "b"});
  Form(1);
  EXPECT_EQ(ring_[0]->transport(1), network());
}

TEST_P(MixedFaults, CopiesDoNotWaitForNetwork) {
  Form(1);
  EventRef both = Start(0, {Receive(0, 2), Send(0, 1)});
  EventRef copied = Start(1, {Receive(1, 0)});
  EXPECT_TRUE(copied->Wait(Soon()).ok()) << copied->Wait(Soon());
  EXPECT_TRUE(HasBytesOf(1, 0));
  EXPECT_FALSE(both->Done());
  EventRef sent = Start(2, {Send(2, 0)});
  EXPECT_TRUE(both->Wait(Soon()).ok()) << both->Wait(Soon());
  EXPECT_TRUE(sent->Wait(Soon()).ok());
  EXPECT_TRUE(HasBytesOf(0, 2));
}

TEST_P(MixedFaults, NetworkDoesNotWaitForCopies) {
  Form(1);
  EventRef both = Start(0, {Receive(0, 1), Send(0, 3)});
  EventRef moved = Start(3, {Receive(3, 0)});
  EXPECT_TRUE(moved->Wait(Soon()).ok()) << moved->Wait(Soon());
  EXPECT_TRUE(HasBytesOf(3, 0));
  EXPECT_FALSE(both->Done());
  EventRef sent = Start(1, {Send(1, 0)});
  EXPECT_TRUE(both->Wait(Soon()).ok()) << both->Wait(Soon());
  EXPECT_TRUE(sent->Wait(Soon()).ok());
  EXPECT_TRUE(HasBytesOf(0, 1));
}

TEST_P(MixedFaults, BothPartsWaitForDependenciesAndEarlierGroups) {
  Form(1);
  std::atomic<bool> go{false};
  EventRef filled = (*ranks_)[0]->FillWhen(&go, Sent(0).data(), kBytes, 7);
  EventRef first = Start(0, {Send(0, 1), Send(0, 2)}, {filled});
  EventRef second = Start(0, {Receive(0, 3)});
  EventRef copied = Start(1, {Receive(1, 0)}), moved = Start(2, {Receive(2, 0)});
  EventRef sent = Start(3, {Send(3, 0)});
  EXPECT_FALSE(copied->Wait(absl::Now() + kLittle).ok());
  for (const EventRef& event : {first, second, copied, moved}) EXPECT_FALSE(event->Done());
  go = true;
  for (const EventRef& event : {first, second, copied, moved, sent}) {
    EXPECT_TRUE(event->Wait(Soon()).ok()) << event->Wait(Soon());
  }
  EXPECT_EQ(Received(1).Read(), std::vector<uint8_t>(kBytes, 7));
  EXPECT_EQ(Received(2).Read(), std::vector<uint8_t>(kBytes, 7));
}

// Groups after an incomplete one, with parts for either engine, in both orders.
TEST_P(MixedFaults, AbortEndsBothPartsOfAllGroups) {
  for (const auto& missing : {Receive(0, 1), Receive(0, 2)}) {
    Form(1);
    std::vector<EventRef> events = {Start(0, {Send(0, 1), Send(0, 2), missing})};
    for (int i = 0; i < 5; ++i) {
      events.push_back(Start(0, {Receive(0, 3), Send(0, 1)}));
      events.push_back(Start(0, {Receive(0, 1)}));
      events.push_back(Start(0, {Send(0, 3)}));
    }
    EXPECT_FALSE(events[0]->Wait(absl::Now() + kLittle).ok());
    const absl::Time begin = absl::Now();
    ring_[0]->Abort("rank 2 was lost");
    for (const EventRef& event : events) {
      const absl::Status status = event->Wait(begin + kAbortBound);
      EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
      EXPECT_THAT(Message(status), HasSubstr("rank 2 was lost"));
    }
    // Other members learn of it elsewhere.
    for (auto& member : ring_) member->Abort("rank 2 was lost");
  }
}

// A copy in flight, whose end the ring's stream waits for before NCCL's next group.
TEST_P(MixedFaults, AbortedGroupWaitsForCopyInFlight) {
  Form(1);
  Faults().hold_copies = true;
  EventRef sent = Start(0, {Send(0, 1)}), received = Start(1, {Receive(1, 0), Receive(1, 2)});
  EventRef behind = Start(1, {Send(1, 3)});
  while (Faults().held_copies == 0) std::this_thread::yield();
  ring_[1]->Abort("teardown");
  const absl::Status early = received->Wait(absl::Now() + kLittle);
  Faults().hold_copies = false;
  EXPECT_EQ(early.code(), absl::StatusCode::kDeadlineExceeded) << early;
  EXPECT_EQ(received->Wait(Soon()).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(behind->Wait(Soon()).code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(HasBytesOf(1, 0));
  EXPECT_TRUE(sent->Wait(Soon()).ok());
}

TEST_P(MixedFaults, LostNetworkNamesItsRanks) {
  if (GetParam() != Network::kNccl) GTEST_SKIP() << "a fault of NCCL";
  Form(1);
  EventRef left = Start(0, {Receive(0, 1), Receive(0, 3)}), right = Start(2, {Receive(2, 1)});
  Faults().lost_network = true;
  EXPECT_THAT(Message(left->Wait(Soon())),
              HasSubstr("exchanging with ranks 2, 3: NCCL: remote process exited"));
  EXPECT_THAT(Message(right->Wait(Soon())), HasSubstr("exchanging with ranks 0, 1: "));
}

// NCCL rejects its part after the other part has been enqueued.
TEST_P(MixedFaults, RejectedNetworkPartEndsRing) {
  if (GetParam() != Network::kNccl) GTEST_SKIP() << "a fault of NCCL";
  Form(1);
  Faults().refuse_sends = true;
  EventRef both = Start(0, {Send(0, 1), Send(0, 2)});
  const absl::Status status = both->Wait(Soon());
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(Message(status), HasSubstr("sending to rank 1, sending to rank 2: "));
  EXPECT_EQ(Start(0, {Receive(0, 1)})->Wait(Soon()).code(), absl::StatusCode::kUnavailable);
  // The other ranks are not affected until they are aborted.
  EventRef copied = Start(3, {Receive(3, 2)}), sent = Start(2, {Send(2, 3)});
  EXPECT_TRUE(copied->Wait(Soon()).ok());
  EXPECT_TRUE(sent->Wait(Soon()).ok());
}

TEST_P(MixedFaults, CopiesDetectSizeMismatch) {
  Form(1);
  (void)Start(0, {Send(0, 1, 8), Receive(0, 2)});
  const absl::Status status = Start(1, {Receive(1, 0, 4), Receive(1, 3)})->Wait(Soon());
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Message(status), HasSubstr("rank 0 sends 8 bytes where 4 are expected"));
}

TEST_P(MixedFaults, StepTimeoutNamesPeersOfBothParts) {
  Make({"a", "a", "b", "b"}, absl::Milliseconds(300));
  Form(1);
  for (const auto& [group, words] :
       {std::pair(std::vector{Send(0, 1), Receive(0, 2)},
                  "sending to rank 1, receiving from rank 2"),
        std::pair(std::vector{Receive(0, 3)}, "receiving from rank 3")}) {
    Form(2);
    const absl::Status status = Start(0, group)->Wait(absl::Now() + kAbortBound);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_THAT(Message(status), HasSubstr(absl::StrCat(words, " took longer than 300ms")));
  }
}

TEST_P(MixedFaults, RejectsForeignBlobs) {
  const auto status_of = [&](const std::string& foreign) {
    std::vector<std::string> blobs = ranks_->Prepare(3);
    blobs[2] = foreign;
    return ranks_->transport(0).Connect(3, blobs, Soon()).status();
  };
  for (const std::string& foreign :
       {std::string("ringattn-wire-1"), EncodeMixedBlob({"", ""}) + "x",
        EncodeMixedBlob({.copies = "nonsense", .nccl = "nccl", .wire = "wire"}),
        EncodeMixedBlob({.nccl = "nonsense", .wire = "nonsense"})}) {
    const absl::Status status = status_of(foreign);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << foreign;
    EXPECT_THAT(Message(status), HasSubstr("rank 2")) << foreign;
  }
  const absl::Status neither = status_of(EncodeMixedBlob({"", ""}));
  EXPECT_EQ(neither.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Message(neither), HasSubstr("rank 2 has no other transport"));
  Form(4);
}

TEST_P(MixedFaults, SilentRankIsUnavailableAndCancelEndsConnect) {
  uint64_t generation = 0;
  // A rank of the same host, and one of the other.
  for (int silent : {1, 3}) {
    const std::vector<std::string> blobs = ranks_->Prepare(++generation);
    std::vector<std::thread> threads;
    std::vector<absl::Status> statuses(4);
    const absl::Time begin = absl::Now();
    for (int rank = 0; rank < 4; ++rank) {
      if (rank == silent) continue;
      threads.emplace_back([&, rank] {
        const absl::Time deadline = rank == 0 ? Soon() : absl::Now() + absl::Seconds(1);
        statuses[rank] = ranks_->transport(rank).Connect(generation, blobs, deadline).status();
      });
    }
    absl::SleepFor(kLittle);
    ranks_->transport(0).Cancel();
    for (std::thread& thread : threads) thread.join();
    EXPECT_LT(absl::Now() - begin, absl::Seconds(1) + kAbortBound);
    for (int rank = 0; rank < 4; ++rank) {
      if (rank == silent) continue;
      EXPECT_EQ(statuses[rank].code(),
                rank == 0 ? absl::StatusCode::kCancelled : absl::StatusCode::kUnavailable)
          << statuses[rank];
    }
  }
  Form(++generation);
}

TEST_P(MixedFaults, OffersNoCopiesAfterRepeatedFailures) {
  FakeVmm().refuse_access = true;
  uint64_t generation = 0;
  for (int failure = 0; failure < MixedRingTransport::kGiveUpAfter; ++failure) {
    for (int rank : {0, 2}) {  // one of each host; the other is then alone
      const std::vector<std::string> blobs = ranks_->Prepare(++generation);
      const absl::Status status =
          ranks_->transport(rank).Connect(generation, blobs, Soon()).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    }
  }
  Form(++generation);
  EXPECT_EQ(ring_[0]->transport(1), network());
  for (const auto& choices : choices_) EXPECT_EQ(choices.back(), "0 1 2 3");
}

TEST_P(MixedFaults, RanksWithoutNcclFormRingsOfOneHost) {
  MixedTransportOptions options;
  options.without_network =
      std::make_unique<SingleRankTransport>(absl::FailedPreconditionError("no library"));
  auto transport = MixedRingTransport::Create(std::move(options));
  ASSERT_TRUE(transport.ok()) << transport.status();
  const absl::StatusOr<std::string> alone = (*transport)->Prepare(1, 0, 1);
  ASSERT_TRUE(alone.ok()) << alone.status();
  EXPECT_TRUE((*transport)->Connect(1, {*alone}, Soon()).ok());
  const absl::Status status = (*transport)->Prepare(2, 0, 2).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Message(status), HasSubstr("no library"));
  // A blob of another rank.
  ASSERT_TRUE((*transport)->Prepare(3, 0, 1).ok());
  const std::string other = ranks_->Prepare(3)[0];
  EXPECT_EQ((*transport)->Connect(3, {other}, Soon()).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_P(MixedFaults, LostPeerOfAnotherHostEndsOnlyItsTransfers) {
  if (uses_nccl()) GTEST_SKIP() << "a lost peer ends everything";
  Form(1);
  EventRef broken = Start(0, {Receive(0, 3), Send(0, 1)}), copied = Start(1, {Receive(1, 0)});
  EXPECT_TRUE(copied->Wait(Soon()).ok()) << copied->Wait(Soon());
  ring_[3] = nullptr;
  const absl::Status status = broken->Wait(absl::Now() + kAbortBound);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(Message(status), HasSubstr("lost rank 3: the peer "));
  for (int round = 0; round < 3; ++round) {
    EventRef both = Start(0, {Receive(0, 1), Send(0, 2)});
    EventRef near = Start(1, {Send(1, 0)}), far = Start(2, {Receive(2, 0)});
    for (const EventRef& event : {both, near, far}) {
      EXPECT_TRUE(event->Wait(Soon()).ok()) << event->Wait(Soon());
    }
    EXPECT_TRUE(HasBytesOf(0, 1) && HasBytesOf(2, 0));
  }
  // Reported by the coordinator.
  EventRef silent = Start(0, {Receive(0, 2), Send(0, 1)}), next = Start(1, {Receive(1, 0)});
  EXPECT_TRUE(next->Wait(Soon()).ok());
  ring_[0]->LosePeer(2, "host b is lost");
  EXPECT_THAT(Message(silent->Wait(absl::Now() + kAbortBound)),
              HasSubstr("lost rank 2: host b is lost"));
  EventRef later = Start(0, {Receive(0, 1)}), sent = Start(1, {Send(1, 0)});
  EXPECT_TRUE(later->Wait(Soon()).ok()) << later->Wait(Soon());
  EXPECT_TRUE(sent->Wait(Soon()).ok());
  // Copy engines do not keep peers apart.
  ring_[0]->LosePeer(1, "rank 1 is lost");
  EXPECT_EQ(Start(0, {})->Wait(Soon()).code(), absl::StatusCode::kUnavailable);
}

TEST_P(MixedFaults, SizeMismatchBetweenHostsNamesPeerAndSizes) {
  if (uses_nccl()) GTEST_SKIP() << "NCCL does not compare sizes";
  Form(1);
  EventRef sent = Start(0, {Send(0, 2, 8)}), received = Start(2, {Receive(2, 0, 4)});
  EXPECT_THAT(Message(sent->Wait(absl::Now() + kAbortBound)), HasSubstr("lost rank 2: "));
  EXPECT_THAT(Message(received->Wait(absl::Now() + kAbortBound)), HasSubstr("lost rank 0: "));
}

// Groups of both lanes over the network, in either order, next to copies.
TEST_P(MixedFaults, LanesOfTheNetworkAreIndependent) {
  if (uses_nccl()) GTEST_SKIP() << "NCCL moves the transfers of both lanes in one order";
  Make({"a", "b", "c"});
  Form(1);
  EventRef waiting = ring_[0]->StartInLane(Lane::kInside, {Receive(0, 1)}, {}, &control_);
  EventRef sent = ring_[0]->StartInLane(Lane::kBetween, {Send(0, 2)}, {}, &control_);
  EventRef received = Start(2, {Receive(2, 0)});
  EXPECT_TRUE(sent->Wait(Soon()).ok()) << sent->Wait(Soon());
  EXPECT_TRUE(received->Wait(Soon()).ok()) << received->Wait(Soon());
  EXPECT_FALSE(waiting->Done());
  EventRef last = Start(1, {Send(1, 0)});
  EXPECT_TRUE(waiting->Wait(Soon()).ok()) << waiting->Wait(Soon());
  EXPECT_TRUE(last->Wait(Soon()).ok());
}

TEST_P(MixedFaults, ReleasesMappingsOfEveryRing) {
  const int own = FakeVmm().mappings;
  for (uint64_t generation = 1; generation <= 10; ++generation) {
    Form(generation);
    EXPECT_EQ(FakeVmm().mappings, own + 4) << "each rank maps the memory of one other";
    ring_.clear();
    EXPECT_EQ(FakeVmm().mappings, own);
  }
}

// Starts and aborts from different threads, repeatedly; also for sanitizers.
TEST_P(MixedFaults, AbortsGroupsInEveryState) {
  for (int round = 0; round < 30; ++round) {
    Form(10 + round);
    std::vector<std::vector<EventRef>> events(4);
    std::atomic<int> started{0};
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 4; ++rank) {
      threads.emplace_back([&, rank] {
        for (int i = 0; i < 20; ++i) {
          const int next = (rank + 1) % 4, previous = (rank + 3) % 4;
          events[rank].push_back(Start(rank, {Send(rank, next), Receive(rank, previous)}));
          ++started;
        }
      });
    }
    while (started < round * 80 / 30) std::this_thread::yield();
    for (auto& member : ring_) member->Abort("race");
    for (std::thread& thread : threads) thread.join();
    for (const auto& of_rank : events) {
      for (const EventRef& event : of_rank) {
        EXPECT_NE(event->Wait(Soon()).code(), absl::StatusCode::kDeadlineExceeded);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Networks, MixedFaults,
                         ::testing::Values(Network::kNccl, Network::kWire, Network::kWireTls),
                         [](const auto& info) {
                           return std::string(info.param == Network::kNccl   ? "nccl"
                                              : info.param == Network::kWire ? "wire"
                                                                             : "wire_tls");
                         });

}  // namespace
}  // namespace ringattn::worker
