// Injected faults of GPU workers, and the measurement of their rings, with the fake CUDA and NCCL.
// The thread that starts work stalls where a CPU worker's queue would.
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/nccl/nccl_ring_transport.h"
#include "worker/comm/peer/peer_ring_transport.h"
#include "worker/device/cuda/cuda_device.h"
#include "worker/faults/fault_injection.h"
#include "worker/measurement/ring_measurement.h"

namespace ringattn::worker {
namespace {

using Kind = PeerTransfer::Kind;

constexpr int64_t kBytes = 4096;

absl::Time Soon() { return absl::Now() + absl::Seconds(30); }

// Two GPU workers' devices and a ring over the transport of that name. Rank 1 has the fault.
class CudaFaults : public testing::TestWithParam<std::string> {
 protected:
  bool peer() const { return GetParam() == "peer"; }

  absl::StatusOr<std::unique_ptr<RingTransport>> MakeTransport(int rank, CudaDevice* device) {
    if (!peer()) return NcclRingTransport::Create({.device = rank});
    return PeerRingTransport::Create(
        {.cuda_index = rank,
         .regions = [device] { return device->regions(); },
         .allocate = [device](int64_t bytes) { return device->Allocate(bytes); }});
  }

  void Make(const std::string& fault) {
    auto plan = ParseFaultPlan(fault);
    ASSERT_TRUE(plan.ok()) << plan.status();
    state_ = std::make_shared<FaultState>();
    state_->plan = *plan;
    state_->holds_start = true;
    for (int rank : {0, 1}) {
      auto device =
          CudaDevice::Create({.device = rank, .pinned_pool_bytes = 16 << 20, .in_regions = peer()});
      ASSERT_TRUE(device.ok()) << device.status();
      auto transport = MakeTransport(rank, device->get());
      ASSERT_TRUE(transport.ok()) << transport.status();
      devices_[rank] = *std::move(device);
      transports_[rank] = *std::move(transport);
    }
    devices_[1] = MakeFaultyDevice(std::move(devices_[1]), state_);
    transports_[1] = MakeFaultyTransport(std::move(transports_[1]), state_);
    Form(1);
  }

  // Connects and measures, as a worker does.
  void Form(uint64_t generation) {
    const std::vector<std::string> blobs = {*transports_[0]->Prepare(generation, 0, 2),
                                            *transports_[1]->Prepare(generation, 1, 2)};
    OnBoth([&](int rank) {
      auto communicator = transports_[rank]->Connect(generation, blobs, Soon());
      ASSERT_TRUE(communicator.ok()) << communicator.status();
      ring_[rank] = *std::move(communicator);
      const auto rates = MeasureRing(*ring_[rank], *devices_[rank], 1 << 20, Soon());
      ASSERT_TRUE(rates.ok()) << rates.status();
      EXPECT_GT(rates->link_bytes_per_second, 0);
      EXPECT_GT(rates->exchange_overhead, absl::ZeroDuration());
    });
    for (int rank : {0, 1}) {
      memory_[rank] = *devices_[rank]->Allocate(2 * kBytes);
      calls_[rank] = *devices_[rank]->Prepare({ZeroCall{memory_[rank]->data(), kBytes}});
    }
  }

  template <typename Work>
  void OnBoth(Work work) {
    std::thread other([&] { work(1); });
    work(0);
    other.join();
  }

  EventRef Exchange(int rank) {
    char* data = static_cast<char*>(memory_[rank]->data());
    return ring_[rank]->Start(
        {{Kind::kSend, 1 - rank, data, kBytes}, {Kind::kReceive, 1 - rank, data + kBytes, kBytes}},
        {}, &control_);
  }
  // Runs one step: the exchange and a call that waits for it. Returns the call's result, or the
  // exchange's if that failed.
  absl::Status Step(int rank) {
    const EventRef exchanged = Exchange(rank);
    const EventRef called = devices_[rank]->Start(*calls_[rank].front(), {exchanged}, &control_);
    const absl::Status status = exchanged->Wait(Soon());
    return status.ok() ? called->Wait(Soon()) : status;
  }

  void Abort() {
    for (auto& communicator : ring_) communicator->Abort("the generation has ended");
  }

  std::shared_ptr<FaultState> state_;
  std::unique_ptr<Device> devices_[2];
  std::unique_ptr<RingTransport> transports_[2];
  std::unique_ptr<Communicator> ring_[2];
  std::unique_ptr<DeviceBuffer> memory_[2];
  PreparedCalls calls_[2];
  RunControl control_;
};

TEST_P(CudaFaults, StalledRankStaysStalledUntilRingEnds) {
  Make("stall_step:1");
  OnBoth([&](int rank) { EXPECT_TRUE(Step(rank).ok()); });
  absl::Notification over;
  absl::Status stalled;
  std::thread rank_1([&] {
    stalled = Step(1);
    over.Notify();
  });
  // Rank 1 exchanged before it stalled, so only its own call is missing.
  EXPECT_TRUE(Step(0).ok());
  EXPECT_FALSE(over.WaitForNotificationWithTimeout(absl::Milliseconds(200)));
  EXPECT_FALSE(devices_[1]->waits_for_transfer()) << "from outside it appears to compute";
  Abort();
  EXPECT_TRUE(over.WaitForNotificationWithTimeout(absl::Seconds(20)));
  rank_1.join();
  EXPECT_TRUE(stalled.ok()) << stalled;
  Form(2);  // the fault occurs once
  OnBoth([&](int rank) { EXPECT_TRUE(Step(rank).ok()); });
}

TEST_P(CudaFaults, PeerWaitsForSkippedGroupUntilRingEnds) {
  Make("skip_send:1");
  OnBoth([&](int rank) { EXPECT_TRUE(Step(rank).ok()); });
  absl::Status skipped;
  std::thread rank_1([&] { skipped = Step(1); });
  const EventRef waiting = Exchange(0);
  EXPECT_EQ(waiting->Wait(absl::Now() + absl::Milliseconds(200)).code(),
            absl::StatusCode::kDeadlineExceeded);
  Abort();
  EXPECT_EQ(waiting->Wait(Soon()).code(), absl::StatusCode::kUnavailable);
  rank_1.join();
  EXPECT_EQ(skipped.code(), absl::StatusCode::kUnavailable) << skipped;
  Form(2);
  OnBoth([&](int rank) { EXPECT_TRUE(Step(rank).ok()); });
}

TEST_P(CudaFaults, FailedGroupFailsItsRankAtOnce) {
  Make("fail_send:1");
  OnBoth([&](int rank) { EXPECT_TRUE(Step(rank).ok()); });
  const EventRef waiting = Exchange(0);
  EXPECT_EQ(Step(1).code(), absl::StatusCode::kUnavailable);
  Abort();
  EXPECT_EQ(waiting->Wait(Soon()).code(), absl::StatusCode::kUnavailable);
  Form(2);
  OnBoth([&](int rank) { EXPECT_TRUE(Step(rank).ok()); });
}

TEST_P(CudaFaults, SlowRankMakesProgress) {
  Make("slow_step_ms:80");
  const int64_t before = control_.progress.load();
  const absl::Time begin = absl::Now();
  OnBoth([&](int rank) { EXPECT_TRUE(Step(rank).ok()); });
  EXPECT_GE(absl::Now() - begin, absl::Milliseconds(80));
  EXPECT_GT(control_.progress.load() - before, 6);
  // A stop ends the delay.
  control_.stop = true;
  state_->plan.slow_step_ms = absl::ToInt64Milliseconds(absl::Hours(1));
  OnBoth([&](int rank) { EXPECT_TRUE(Step(rank).ok()); });
}

INSTANTIATE_TEST_SUITE_P(Transports, CudaFaults, testing::Values("nccl", "peer"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace ringattn::worker
