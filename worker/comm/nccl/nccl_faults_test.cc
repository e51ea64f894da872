// Rings whose NCCL fails, with the fake NCCL.
#include <atomic>
#include <thread>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/nccl/nccl_ring_transport.h"
#include "worker/testing/fake_cuda/fake_cuda.h"

namespace ringattn::worker {
namespace {

using Kind = PeerTransfer::Kind;
using ::testing::HasSubstr;

absl::Time Soon() { return absl::Now() + absl::Seconds(20); }

class NcclFaults : public ::testing::Test {
 protected:
  void SetUp() override {
    for (int rank : {0, 1}) {
      NcclTransportOptions options;
      options.device = rank;
      options.abort_timeout = absl::Milliseconds(100);
      options.on_stuck = [this](const std::string& what) {
        EXPECT_THAT(what, HasSubstr("ncclCommAbort"));
        ++stuck_;
      };
      auto transport = NcclRingTransport::Create(options);
      ASSERT_TRUE(transport.ok()) << transport.status();
      transports_[rank] = *std::move(transport);
    }
    Form(1);
  }

  void TearDown() override {
    Faults().abort_ms = 0;
    Faults().launch_ms = 0;
    Faults().lost_network = false;
    Faults().refuse_sends = false;
  }

  void Form(uint64_t generation) {
    const std::vector<std::string> blobs = {*transports_[0]->Prepare(generation, 0, 2),
                                            *transports_[1]->Prepare(generation, 1, 2)};
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

  EventRef Start(int rank, Kind kind) {
    return ring_[rank]->Start({{kind, 1 - rank, &data_[rank], sizeof(int)}}, {}, &control_);
  }

  std::atomic<int> stuck_{0};
  RunControl control_;
  int data_[2] = {};
  std::unique_ptr<NcclRingTransport> transports_[2];
  std::unique_ptr<Communicator> ring_[2];
};

TEST_F(NcclFaults, ReportsHangingAbort) {
  EventRef receive = Start(1, Kind::kReceive);
  Faults().abort_ms = 400;
  ring_[1]->Abort("teardown");
  EXPECT_EQ(receive->Wait(Soon()).code(), absl::StatusCode::kUnavailable);
  ring_[1] = nullptr;  // waits for the abort
  EXPECT_EQ(stuck_.load(), 1);
}

TEST_F(NcclFaults, NcclErrorEndsRing) {
  EventRef receive = Start(1, Kind::kReceive);
  Faults().lost_network = true;
  const absl::Status status = receive->Wait(Soon());
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("remote process exited"));
  EXPECT_EQ(Start(1, Kind::kReceive)->Wait(Soon()).code(), absl::StatusCode::kUnavailable);
}

TEST_F(NcclFaults, RejectedGroupEndsRing) {
  Faults().refuse_sends = true;
  const absl::Status status = Start(0, Kind::kSend)->Wait(Soon());
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("sending to rank 1: ncclSend"));
  EXPECT_EQ(control_.progress.load(), 0);
}

TEST_F(NcclFaults, AbortEndsStuckLaunch) {
  Faults().launch_ms = 60'000;
  const absl::Time begin = absl::Now();
  std::atomic<bool> starting{false};
  EventRef send;
  std::thread executor([&] {
    starting = true;
    send = Start(0, Kind::kSend);
  });
  while (!starting.load()) std::this_thread::yield();
  ring_[0]->Abort("rank 1 was lost");  // does not wait for the launch
  executor.join();
  const absl::Status status = send->Wait(Soon());
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1 was lost"));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
  EXPECT_EQ(stuck_.load(), 0);
}

TEST_F(NcclFaults, ReformsAfterFailure) {
  Faults().refuse_sends = true;
  EXPECT_FALSE(Start(0, Kind::kSend)->Wait(Soon()).ok());
  Faults().refuse_sends = false;
  for (auto& member : ring_) member = nullptr;
  Form(2);
  data_[0] = 42;
  EventRef send = Start(0, Kind::kSend), receive = Start(1, Kind::kReceive);
  EXPECT_TRUE(send->Wait(Soon()).ok());
  EXPECT_TRUE(receive->Wait(Soon()).ok());
  EXPECT_EQ(data_[1], 42);
}

// Starts and aborts from different threads, repeatedly; also for sanitizers.
TEST_F(NcclFaults, AbortsGroupsInEveryState) {
  for (int round = 0; round < 50; ++round) {
    Form(10 + round);
    std::vector<EventRef> events[2];
    std::vector<std::thread> threads;
    for (int rank : {0, 1}) {
      threads.emplace_back([&, rank] {
        for (int i = 0; i < 20; ++i) {
          events[rank].push_back(Start(rank, (i + rank) % 2 == 0 ? Kind::kSend : Kind::kReceive));
        }
      });
    }
    for (int i = 0; i < round * 20; ++i) std::this_thread::yield();
    for (int rank : {0, 1}) ring_[rank]->Abort("race");
    for (std::thread& thread : threads) thread.join();
    for (int rank : {0, 1}) {
      for (const EventRef& event : events[rank]) {
        EXPECT_NE(event->Wait(Soon()).code(), absl::StatusCode::kDeadlineExceeded);
      }
    }
    for (auto& member : ring_) member = nullptr;
  }
  EXPECT_EQ(stuck_.load(), 0);
}

}  // namespace
}  // namespace ringattn::worker
