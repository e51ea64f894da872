// Rings in shared memory with failing members, with the fake CUDA and memory mapped as between
// processes.
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <numeric>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/peer/peer_ring_transport.h"
#include "worker/comm/peer/peer_segment.h"
#include "worker/device/cuda/cuda_event.h"
#include "worker/testing/fake_cuda/fake_cuda.h"

namespace ringattn::worker {
namespace {

using Kind = PeerTransfer::Kind;
using ::testing::HasSubstr;

constexpr int64_t kWords = 1 << 16;

absl::Time Soon() { return absl::Now() + absl::Seconds(20); }

class Borrowed : public DeviceBuffer {
 public:
  Borrowed(void* data, int64_t bytes) : data_(data), bytes_(bytes) {}
  void* data() override { return data_; }
  int64_t bytes() const override { return bytes_; }

 private:
  void* const data_;
  const int64_t bytes_;
};

class PeerFaults : public ::testing::Test {
 protected:
  void SetUp() override {
    for (int rank : {0, 1}) {
      memory_[rank].assign(kWords, -1);
      PeerTransportOptions options;
      options.cuda_index = rank;
      options.regions = [this, rank] { return Regions(rank); };
      // The last words are reserved for the first exchange.
      options.allocate = [this, rank](int64_t bytes) {
        return std::make_unique<Borrowed>(&memory_[rank][kWords - 64], bytes);
      };
      options.abort_timeout = absl::Seconds(2);
      options.on_stuck = [this](const std::string&) { ++stuck_; };
      options.ipc_within_process = true;
      auto transport = PeerRingTransport::Create(std::move(options));
      ASSERT_TRUE(transport.ok()) << transport.status();
      transports_[rank] = *std::move(transport);
    }
  }

  void TearDown() override {
    for (auto& member : ring_) member = nullptr;
    EXPECT_EQ(Faults().mapped.load(), 0);
    EXPECT_EQ(stuck_.load(), 0);
    Faults().refuse_ipc = false;
    Faults().refuse_mapping = false;
    Faults().held_copies = 0;
    Faults().full_streams = 0;
  }

  std::vector<std::string> Prepare(uint64_t generation) {
    return {*transports_[0]->Prepare(generation, 0, 2), *transports_[1]->Prepare(generation, 1, 2)};
  }

  void Form(uint64_t generation) {
    const std::vector<std::string> blobs = Prepare(generation);
    std::vector<std::thread> threads;
    for (int rank : {0, 1}) {
      threads.emplace_back([&, rank] {
        auto communicator = transports_[rank]->Connect(generation, blobs, Soon());
        ASSERT_TRUE(communicator.ok()) << communicator.status();
        ring_[rank] = *std::move(communicator);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  EventRef Start(int rank, Kind kind, int64_t word, int64_t bytes = sizeof(int)) {
    return ring_[rank]->Start({{kind, 1 - rank, &memory_[rank][word], bytes}}, {}, &control_);
  }

  // The device's regions; includes later_ once it has grown.
  std::vector<DeviceRegion> Regions(int rank) {
    const auto region = [](std::vector<int>& words) {
      return DeviceRegion{reinterpret_cast<char*>(words.data()),
                          static_cast<int64_t>(words.size() * sizeof(int))};
    };
    std::vector<DeviceRegion> regions = {region(memory_[rank])};
    if (grown_.load()) regions.push_back(region(later_[rank]));
    return regions;
  }

  std::atomic<int> stuck_{0};
  std::atomic<bool> grown_{false};
  RunControl control_;
  std::vector<int> memory_[2], later_[2];
  std::unique_ptr<PeerRingTransport> transports_[2];
  std::unique_ptr<Communicator> ring_[2];
};

TEST_F(PeerFaults, MapsAndUnmapsMemoryOfOtherProcesses) {
  Form(1);
  EXPECT_EQ(Faults().mapped.load(), 2);
  memory_[0][5] = 42;
  EventRef send = Start(0, Kind::kSend, 5), receive = Start(1, Kind::kReceive, 6);
  EXPECT_TRUE(send->Wait(Soon()).ok());
  EXPECT_TRUE(receive->Wait(Soon()).ok());
  EXPECT_EQ(memory_[1][6], 42);
}

TEST_F(PeerFaults, MapsNewMemoryWhenItIsSent) {
  Form(1);
  for (auto& words : later_) words.assign(100, -1);
  grown_ = true;
  for (int round = 0; round < 3; ++round) {
    later_[0][7] = round;
    memory_[0][8] = 10 + round;
    std::vector<PeerTransfer> sends = {{Kind::kSend, 1, &later_[0][7], 4},
                                       {Kind::kSend, 1, &memory_[0][8], 4}};
    std::vector<PeerTransfer> receives = {{Kind::kReceive, 0, &later_[1][1], 4},
                                          {Kind::kReceive, 0, &memory_[1][2], 4}};
    EventRef sent = ring_[0]->Start(sends, {}, &control_);
    EventRef received = ring_[1]->Start(receives, {}, &control_);
    ASSERT_TRUE(sent->Wait(Soon()).ok());
    ASSERT_TRUE(received->Wait(Soon()).ok());
    EXPECT_EQ(later_[1][1], round);
    EXPECT_EQ(memory_[1][2], 10 + round);
  }
  EXPECT_EQ(Faults().mapped.load(), 3);  // rank 1 maps rank 0's new region once
}

TEST_F(PeerFaults, FailedLaterMappingEndsRing) {
  Form(1);
  later_[0].assign(100, 5);
  later_[1].assign(100, -1);
  grown_ = true;
  Faults().refuse_mapping = true;
  EventRef sent = ring_[0]->Start({{Kind::kSend, 1, &later_[0][0], 4}}, {}, &control_);
  EventRef received = ring_[1]->Start({{Kind::kReceive, 0, &later_[1][0], 4}}, {}, &control_);
  const absl::Status status = received->Wait(Soon());
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("memory of rank 0"));
  ring_[0]->Abort("rank 1 left");
  EXPECT_FALSE(sent->Wait(Soon()).ok());
  EXPECT_EQ(later_[1][0], -1);
}

TEST_F(PeerFaults, DetectsSizeMismatch) {
  Form(1);
  (void)Start(0, Kind::kSend, 0, 8);
  const absl::Status status = Start(1, Kind::kReceive, 0, 4)->Wait(Soon());
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("rank 0 sends 8 bytes where 4 are expected"));
  EXPECT_EQ(memory_[1][0], -1);
}

TEST_F(PeerFaults, RejectsBytesOutsideRegions) {
  Form(1);
  int elsewhere = 0;
  const absl::Status status =
      ring_[0]->Start({{Kind::kSend, 1, &elsewhere, 4}}, {}, &control_)->Wait(Soon());
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("outside of the memory"));
}

TEST_F(PeerFaults, HandlesMoreTransfersThanPostedSendsFit) {
  Form(1);
  constexpr int kCount = 3 * static_cast<int>(kPostedSends) + 5;
  std::iota(memory_[0].begin(), memory_[0].begin() + kCount, 0);
  std::vector<PeerTransfer> sends, receives;
  for (int i = 0; i < kCount; ++i) {
    sends.push_back({Kind::kSend, 1, &memory_[0][i], 4});
    receives.push_back({Kind::kReceive, 0, &memory_[1][kCount - i], 4});
  }
  EventRef sent = ring_[0]->Start(sends, {}, &control_);
  absl::SleepFor(absl::Milliseconds(20));  // the table of posted sends is full in either direction
  EventRef received = ring_[1]->Start(receives, {}, &control_);
  EXPECT_TRUE(received->Wait(Soon()).ok());
  EXPECT_TRUE(sent->Wait(Soon()).ok());
  for (int i = 0; i < kCount; ++i) ASSERT_EQ(memory_[1][kCount - i], i);
}

TEST_F(PeerFaults, AbortDoesNotReleasePeers) {
  Form(1);
  EventRef mine = Start(0, Kind::kReceive, 0), theirs = Start(1, Kind::kReceive, 0);
  ring_[0]->Abort("teardown");
  EXPECT_EQ(mine->Wait(Soon()).code(), absl::StatusCode::kUnavailable);
  ring_[0] = nullptr;
  // Rank 1 learns of the abort elsewhere and must not accept garbage meanwhile.
  EXPECT_FALSE(theirs->Wait(absl::Now() + absl::Milliseconds(50)).ok());
  EXPECT_FALSE(theirs->Done());
  ring_[1]->Abort("rank 0 left");
  EXPECT_EQ(theirs->Wait(Soon()).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(memory_[1][0], -1);
}

// After a group has ended, its memory may be reused.
TEST_F(PeerFaults, AbortedGroupWaitsForCopyInFlight) {
  Form(1);
  Faults().hold_copies = true;
  memory_[0][5] = 42;
  EventRef sent = Start(0, Kind::kSend, 5), received = Start(1, Kind::kReceive, 6);
  while (Faults().held_copies == 0) std::this_thread::yield();
  ring_[1]->Abort("teardown");
  const absl::Status early = received->Wait(absl::Now() + absl::Milliseconds(50));
  EXPECT_EQ(memory_[1][6], -1);
  Faults().hold_copies = false;
  EXPECT_EQ(early.code(), absl::StatusCode::kDeadlineExceeded) << early;
  EXPECT_EQ(received->Wait(Soon()).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(memory_[1][6], 42);
  EXPECT_TRUE(sent->Wait(Soon()).ok());
}

// Rank 0 enqueues a group on a full stream when the ring is aborted. Then a copy of rank 1, which
// began earlier, writes a word that the stream waits for.
TEST_F(PeerFaults, AbortEndsStartOnFullStream) {
  Form(1);
  Faults().hold_copies = true;
  EventRef sent = Start(0, Kind::kSend, 5), received = Start(1, Kind::kReceive, 6);
  while (Faults().held_copies == 0) std::this_thread::yield();
  absl::StatusOr<CudaEventPool*> events = CudaEventPool::ForDevice(0);
  ASSERT_TRUE(events.ok());
  cudaStream_t compute = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&compute, cudaStreamNonBlocking), cudaSuccess);
  absl::Notification computed, started;
  FakeCudaEnqueue(compute, [&] { computed.WaitForNotification(); });
  auto call = std::make_shared<CudaEvent>(*events, nullptr, 0);
  ASSERT_TRUE(call->RecordEnd(compute).ok());

  Faults().stream_depth = 4;  // enough for all but the last words of the new group
  EventRef next;
  std::thread starter([&] {
    next = ring_[0]->Start(
        {{Kind::kSend, 1, &memory_[0][7], 4}, {Kind::kReceive, 1, &memory_[0][8], 4}}, {call},
        &control_);
    started.Notify();
  });
  while (Faults().full_streams == 0) std::this_thread::yield();
  Faults().stream_depth = 1;  // full from here on
  ring_[0]->Abort("teardown");
  Faults().hold_copies = false;
  EXPECT_TRUE(received->Wait(Soon()).ok());
  computed.Notify();
  EXPECT_TRUE(started.WaitForNotificationWithTimeout(absl::Seconds(20)));
  Faults().stream_depth = 0;
  starter.join();
  EXPECT_EQ(next->Wait(Soon()).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(sent->Wait(Soon()).code(), absl::StatusCode::kUnavailable);
  (void)cudaStreamDestroy(compute);
}

// After a rank has left the ring, its descriptor number may refer to something else.
TEST_F(PeerFaults, SegmentReplacedBySocketIsUnavailable) {
  const int other = socket(AF_UNIX, SOCK_STREAM, 0);
  ASSERT_GE(other, 0);
  const std::string path = absl::StrCat("/proc/", getpid(), "/fd/", other);
  EXPECT_EQ(PeerSegment::Open(path, 1, 1, 2).status().code(), absl::StatusCode::kUnavailable);
  close(other);
}

TEST_F(PeerFaults, MissingSegmentIsUnavailable) {
  const std::vector<std::string> blobs = Prepare(1);
  transports_[1] = nullptr;
  const absl::Status status = transports_[0]->Connect(1, blobs, Soon()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1"));
}

TEST_F(PeerFaults, RejectsSegmentOfOtherGeneration) {
  const std::vector<std::string> old = Prepare(1);
  std::vector<std::string> blobs = {*transports_[0]->Prepare(2, 0, 2), old[1]};
  EXPECT_EQ(transports_[0]->Connect(2, blobs, Soon()).status().code(),
            absl::StatusCode::kUnavailable);
}

TEST_F(PeerFaults, ReportsFailedMapping) {
  Faults().refuse_mapping = true;
  const std::vector<std::string> blobs = Prepare(1);
  const absl::Status status = transports_[0]->Connect(1, blobs, Soon()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("memory of rank 1"));
}

TEST_F(PeerFaults, ReportsDeviceThatCannotShareAtCreation) {
  Faults().refuse_ipc = true;
  PeerTransportOptions options;
  options.regions = [this] { return Regions(0); };
  EXPECT_EQ(PeerRingTransport::Create(options).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

// Starts and aborts from different threads, repeatedly; also for sanitizers.
TEST_F(PeerFaults, AbortsGroupsInEveryState) {
  for (int round = 0; round < 50; ++round) {
    Form(10 + round);
    std::vector<EventRef> events[2];
    std::atomic<int> started{0};
    std::vector<std::thread> threads;
    for (int rank : {0, 1}) {
      threads.emplace_back([&, rank] {
        for (int i = 0; i < 20; ++i) {
          events[rank].push_back(
              Start(rank, (i + rank) % 2 == 0 ? Kind::kSend : Kind::kReceive, i));
          ++started;
        }
      });
    }
    // Counts instead of waiting for some time: a yield takes milliseconds if all cores are busy.
    while (started < round * 40 / 50) std::this_thread::yield();
    for (int rank : {0, 1}) ring_[rank]->Abort("race");
    for (std::thread& thread : threads) thread.join();
    for (int rank : {0, 1}) {
      for (const EventRef& event : events[rank]) {
        EXPECT_NE(event->Wait(Soon()).code(), absl::StatusCode::kDeadlineExceeded);
      }
    }
    for (auto& member : ring_) member = nullptr;
  }
}

}  // namespace
}  // namespace ringattn::worker
