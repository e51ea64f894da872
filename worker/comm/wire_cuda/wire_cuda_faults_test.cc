// Rings of GPUs over sockets whose members, connections or copies fail, with the fake of CUDA.
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/contract/ring_fixture.h"
#include "worker/comm/cuda/gpu_ranks.h"
#include "worker/comm/wire_cuda/wire_cuda_ranks.h"
#include "worker/testing/fake_cuda/fake_cuda.h"

namespace ringattn::worker {

// Required by the fixture; this program links none of the contract's cases.
std::vector<RingUnderTest> RingsUnderTest() { return {}; }

namespace {

using Kind = PeerTransfer::Kind;
using ::testing::HasSubstr;

constexpr int64_t kBytes = 3 << 20;
constexpr absl::Duration kLittle = absl::Milliseconds(100);

class WireCudaFaults : public ::testing::Test {
 protected:
  void SetUp() override { Make(WireCudaRing("wire", 2, /*tls=*/false)); }

  void TearDown() override {
    Faults().hold_copies = false;
    Faults().stream_depth = 0;
    ring_.clear();
    memory_.clear();
  }

  void Make(const RingUnderTest& ring, int world_size = 3) {
    ring_.clear();
    memory_.clear();
    ranks_ = std::make_unique<Ranks>(ring, TestRankOptions{.world_size = world_size});
    for (int rank = 0; rank < world_size; ++rank) {
      memory_.push_back(std::make_unique<Memory>((*ranks_)[rank], Pattern(kBytes, rank)));
      memory_.push_back(std::make_unique<Memory>((*ranks_)[rank], kBytes));
    }
    ring_ = ranks_->Form(++generation_);
    ASSERT_TRUE(Formed(ring_));
  }

  PeerTransfer Send(int rank, int to, int64_t bytes = kBytes) {
    return {Kind::kSend, to, memory_[2 * rank]->data(), bytes};
  }
  PeerTransfer Receive(int rank, int from, int64_t bytes = kBytes) {
    return {Kind::kReceive, from, memory_[2 * rank + 1]->data(), bytes};
  }
  EventRef Start(int rank, std::vector<PeerTransfer> group) {
    return ring_[rank]->Start(std::move(group), {}, &control_);
  }
  bool HasBytesOf(int rank, int from) {
    return memory_[2 * rank + 1]->Read() == Pattern(kBytes, from);
  }

  uint64_t generation_ = 0;
  RunControl control_;
  std::unique_ptr<Ranks> ranks_;
  std::vector<MemoryRef> memory_;
  Ring ring_;
};

// The memory of a failed transfer is free only once no copy uses it.
TEST_F(WireCudaFaults, FailedTransferEndsAfterItsCopies) {
  for (const bool sends : {true, false}) {
    Make(WireCudaRing("wire", 2, /*tls=*/false));
    Faults().held_copies = 0;
    Faults().hold_copies = sends;
    EventRef sent = Start(0, {Send(0, 1)}), received = Start(1, {Receive(1, 0)});
    if (!sends) {
      // The first copy out of the device is let pass, so that the next ones are held on both sides.
      while (!sent->Done()) std::this_thread::yield();
      EXPECT_TRUE(received->Wait(Soon()).ok());
      Faults().hold_copies = true;
      sent = Start(0, {Send(0, 1)});
      received = Start(1, {Receive(1, 0)});
    }
    while (Faults().held_copies == 0) std::this_thread::yield();
    ring_[0]->LosePeer(1, "it is silent");
    EXPECT_FALSE(sent->Wait(absl::Now() + kLittle).ok());
    EXPECT_FALSE(sent->Done()) << "a copy is in progress";
    Faults().hold_copies = false;
    EXPECT_THAT(Message(sent->Wait(Soon())), HasSubstr("lost rank 1: it is silent"));
    EXPECT_THAT(Message(received->Wait(Soon())), HasSubstr("lost rank 0: the peer "));
  }
}

TEST_F(WireCudaFaults, AbortWaitsForCopiesInFlight) {
  Faults().hold_copies = true;
  Faults().held_copies = 0;
  EventRef sent = Start(0, {Send(0, 1)}), later = Start(0, {Receive(0, 2)});
  EventRef received = Start(1, {Receive(1, 0)});
  while (Faults().held_copies == 0) std::this_thread::yield();
  ring_[0]->Abort("teardown");
  EXPECT_EQ(sent->Wait(absl::Now() + kLittle).code(), absl::StatusCode::kDeadlineExceeded);
  Faults().hold_copies = false;
  EXPECT_THAT(Message(sent->Wait(Soon())), HasSubstr("teardown"));
  EXPECT_THAT(Message(later->Wait(Soon())), HasSubstr("teardown"));
  EXPECT_THAT(Message(received->Wait(Soon())), HasSubstr("lost rank 0: "));
}

// A peer that grants and does not read keeps some of the slots. Others have the rest.
TEST_F(WireCudaFaults, PeerThatIsNotReadyDelaysNoOther) {
  Make(WireCudaRing("few_slots", 2, /*tls=*/true, /*slots=*/2));
  // Rank 1 has not posted its receive, so nothing is staged for it.
  EventRef waits = ring_[0]->StartInLane(Lane::kInside, {Send(0, 1)}, {}, &control_);
  for (int round = 0; round < 3; ++round) {
    EventRef sent = ring_[0]->StartInLane(Lane::kBetween, {Send(0, 2)}, {}, &control_);
    EventRef received = Start(2, {Receive(2, 0)});
    EXPECT_TRUE(sent->Wait(Soon()).ok()) << sent->Wait(Soon());
    EXPECT_TRUE(received->Wait(Soon()).ok()) << received->Wait(Soon());
    EXPECT_TRUE(HasBytesOf(2, 0));
  }
  EXPECT_FALSE(waits->Done());
  EventRef received = Start(1, {Receive(1, 0)});
  EXPECT_TRUE(waits->Wait(Soon()).ok()) << waits->Wait(Soon());
  EXPECT_TRUE(received->Wait(Soon()).ok());
}

// A receive whose stream has not reached it is not granted, so its memory is not written.
TEST_F(WireCudaFaults, NothingArrivesBeforeTheStreamReachesTheGroup) {
  std::atomic<bool> go{false};
  char* const target = memory_[3]->data();
  EventRef filled = (*ranks_)[1]->FillWhen(&go, target, kBytes, 7);
  EventRef received = ring_[1]->Start({Receive(1, 0)}, {filled}, &control_);
  EventRef sent = Start(0, {Send(0, 1)});
  EXPECT_FALSE(sent->Wait(absl::Now() + kLittle).ok());
  EXPECT_EQ(memory_[3]->Read(), std::vector<uint8_t>(kBytes, 0xee));
  go = true;
  EXPECT_TRUE(sent->Wait(Soon()).ok()) << sent->Wait(Soon());
  EXPECT_TRUE(received->Wait(Soon()).ok()) << received->Wait(Soon());
  EXPECT_TRUE(HasBytesOf(1, 0));
}

TEST_F(WireCudaFaults, SizeMismatchNamesPeerAndBothSizes) {
  EventRef sent = Start(0, {Send(0, 1, 8)}), received = Start(1, {Receive(1, 0, 4)});
  const std::string first = Message(sent->Wait(Soon())), second = Message(received->Wait(Soon()));
  EXPECT_THAT(first, HasSubstr("lost rank 1: "));
  EXPECT_THAT(second, HasSubstr("lost rank 0: "));
  // One rank compares the sizes, and the other may only see the connection's end.
  EXPECT_THAT(first + second, HasSubstr("it expects 4 bytes, but 8 are to be sent"));
}

TEST_F(WireCudaFaults, MixOfTlsAndPlainTextNamesTheRankAndTheFlag) {
  CudaWireTransportOptions secure = TestWireOptions(0, 2, TestTlsMaterial(), {});
  CudaWireTransportOptions plain = TestWireOptions(1, 2, std::nullopt, {});
  const auto a = *CudaWireTransport::Create(secure), b = *CudaWireTransport::Create(plain);
  const std::vector<std::string> blobs = {*a->Prepare(1, 0, 2), *b->Prepare(1, 1, 2)};
  for (CudaWireTransport* rank : {a.get(), b.get()}) {
    const absl::Status status = rank->Connect(1, blobs, Soon()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(Message(status), HasSubstr("rank 1 has no cluster certificate, but rank 0 has one; "
                                           "give all workers --cluster_tls_cert or none"));
  }
}

// A full stream blocks the thread that enqueues, until an abort releases it.
TEST_F(WireCudaFaults, AbortEndsCallsThatWaitForAFullStream) {
  Faults().stream_depth = 6;
  std::vector<EventRef> events(20);
  std::thread starts([&] {
    for (EventRef& event : events) event = Start(0, {Receive(0, 1)});
  });
  while (Faults().full_streams == 0) std::this_thread::yield();
  ring_[0]->Abort("teardown");
  starts.join();
  for (const EventRef& event : events) {
    EXPECT_EQ(event->Wait(Soon()).code(), absl::StatusCode::kUnavailable);
  }
}

// Starts and aborts from different threads, repeatedly; also for sanitizers.
TEST_F(WireCudaFaults, AbortsGroupsInEveryState) {
  for (int round = 0; round < 15; ++round) {
    Make(WireCudaRing("wire", 3, /*tls=*/round % 2 == 1, /*slots=*/1 + round));
    std::vector<std::vector<EventRef>> events(3);
    std::atomic<int> started{0};
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 3; ++rank) {
      threads.emplace_back([&, rank] {
        for (int i = 0; i < 20; ++i) {
          events[rank].push_back(
              Start(rank, {Send(rank, (rank + 1) % 3), Receive(rank, (rank + 2) % 3)}));
          ++started;
        }
      });
    }
    while (started < round * 60 / 15) std::this_thread::yield();
    if (round % 3 == 0) {
      for (int rank = 0; rank < 3; ++rank) ring_[rank]->LosePeer((rank + 1) % 3, "race");
    }
    for (auto& member : ring_) member->Abort("race");
    for (std::thread& thread : threads) thread.join();
    for (const auto& of_rank : events) {
      for (const EventRef& event : of_rank) {
        EXPECT_NE(event->Wait(Soon()).code(), absl::StatusCode::kDeadlineExceeded);
      }
    }
  }
}

}  // namespace
}  // namespace ringattn::worker
