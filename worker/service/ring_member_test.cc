#include "worker/service/ring_member.h"
#include "worker/comm/communicator_wrapper.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "common/base/monotonic_time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/inproc/inproc_communicator.h"
#include "worker/testing/scalar_device.h"

namespace ringattn::worker {
namespace {

// Notifies when its first group is started.
class NoticedRing : public CommunicatorWrapper {
 public:
  NoticedRing(std::unique_ptr<Communicator> inner, absl::Notification* started)
      : CommunicatorWrapper(std::move(inner)), started_(started) {}
  EventRef StartInLane(Lane lane, std::vector<PeerTransfer> group, std::vector<EventRef> after,
                       RunControl* control) override {
    EventRef event =
        CommunicatorWrapper::StartInLane(lane, std::move(group), std::move(after), control);
    if (!started_->HasBeenNotified()) started_->Notify();
    return event;
  }

 private:
  absl::Notification* const started_;
};

// Connects at once to a rank 1 that does nothing until the test continues.
class HalfTransport : public RingTransport {
 public:
  absl::StatusOr<std::string> Prepare(uint64_t, int, int) override { return std::string("me"); }
  absl::StatusOr<std::unique_ptr<Communicator>> Connect(uint64_t, const std::vector<std::string>&,
                                                        absl::Time deadline) override {
    left = deadline - MonotonicNow();
    if (!refusal.ok()) return refusal;
    auto ring = MakeInProcessRing(2);
    peer = std::move(ring[1]);
    return std::make_unique<NoticedRing>(std::move(ring[0]), &measuring);
  }
  void Cancel() override {}

  absl::Duration left;  // until the deadline of Connect
  absl::Status refusal;
  std::unique_ptr<Communicator> peer;
  absl::Notification measuring;
};

class RingMemberTest : public testing::Test {
 protected:
  RingMemberTest()
      : budget_(1 << 30),
        watchdog_([](const std::string& what) { ADD_FAILURE() << what; }),
        registry_(&device_, &budget_, [](const OperationInfo&) {}),
        runner_(&device_, [](ShardOperation&, const absl::StatusOr<ExecutionReport>&,
                             const RunningOperation&) {}) {}

  std::unique_ptr<RingMember> Make(absl::Duration connect_timeout) {
    RingMemberOptions options;
    options.connect_timeout = connect_timeout;
    options.memory_limit_bytes = 1 << 20;
    return std::make_unique<RingMember>(options, &device_, &transport_, &registry_, &runner_,
                                        &probe_, &watchdog_);
  }

  ScalarDevice device_;
  MemoryBudget budget_;
  ActivityProbe probe_;
  Watchdog watchdog_;
  OperationRegistry registry_;
  OperationRunner runner_;
  HalfTransport transport_;
};

TEST_F(RingMemberTest, CommitEndsAfterMeasurement) {
  auto member = Make(absl::Seconds(30));
  ASSERT_TRUE(member->Prepare(1, 0, 2).ok());
  std::thread peer([&] {
    transport_.measuring.WaitForNotification();
    ScalarDevice device;
    const auto rates = MeasureRing(*transport_.peer, device, 1 << 20, absl::InfiniteFuture());
    EXPECT_TRUE(rates.ok()) << rates.status();
  });
  const auto rates = member->Commit(1, {"me", "peer"}, {});
  peer.join();
  ASSERT_TRUE(rates.ok()) << rates.status();
  EXPECT_GT(rates->link_bytes_per_second, 0);
  EXPECT_TRUE(member->formed());
  member->TearDown("the test is over");
}

// Kernels wait for keys only if the ring needs none of their compute units.
TEST_F(RingMemberTest, NoLateKeysIfTransfersUseComputeUnits) {
  auto member = Make(absl::Seconds(30));
  EXPECT_FALSE(member->key_arrival().may_be_late()) << "there is no ring";
  ASSERT_TRUE(member->Prepare(1, 0, 2).ok());
  std::thread peer([&] {
    transport_.measuring.WaitForNotification();
    ScalarDevice device;
    (void)MeasureRing(*transport_.peer, device, 1 << 20, absl::InfiniteFuture());
  });
  ASSERT_TRUE(member->Commit(1, {"me", "peer"}, {}).ok());
  peer.join();
  EXPECT_FALSE(member->key_arrival().may_be_late());
  member->TearDown("the test is over");
}

// A ring in which transfers with some ranks use compute units.
class PartlyByUnits : public CommunicatorWrapper {
 public:
  PartlyByUnits(int world_size, std::vector<int> by_units)
      : CommunicatorWrapper(std::move(MakeInProcessRing(world_size)[0])),
        by_units_(std::move(by_units)) {}
  bool takes_compute_units(int peer) const override {
    return std::find(by_units_.begin(), by_units_.end(), peer) != by_units_.end();
  }

 private:
  const std::vector<int> by_units_;
};

TEST(KeyArrivalOf, PeersWithoutComputeUnitsMayBeLate) {
  RingRates rates;
  rates.link_bytes_per_second = 300e9;
  rates.exchange_overhead = absl::Microseconds(10);
  const KeyArrival all = KeyArrivalOf(PartlyByUnits(4, {}), rates);
  EXPECT_EQ(all.In(Lane::kInside).bytes_per_second, 300e9);
  EXPECT_FALSE(all.may_be_late(Lane::kBetween)) << "the ring is on one host";
  EXPECT_THAT(all.takes_compute_units, testing::ElementsAre(false, false, false, false));
  rates.host_link_bytes_per_second = 1e9;
  // Keys of a slow neighbour on another host do not arrive late, and the others may.
  const KeyArrival inside = KeyArrivalOf(PartlyByUnits(4, {}), rates);
  EXPECT_TRUE(inside.may_be_late(Lane::kInside));
  EXPECT_FALSE(inside.may_be_late(Lane::kBetween));
  // Steps with the slow neighbours do not wait, and the others may.
  const KeyArrival some = KeyArrivalOf(PartlyByUnits(4, {2, 3}), rates);
  EXPECT_EQ(some.In(Lane::kInside).bytes_per_second, 300e9);
  EXPECT_THAT(some.takes_compute_units, testing::ElementsAre(false, false, true, true));
  EXPECT_FALSE(KeyArrivalOf(PartlyByUnits(4, {1, 2, 3}), rates).may_be_late());
  rates.host_link_bytes_per_second = 200e9;
  rates.host_exchange_overhead = absl::Microseconds(30);
  const KeyArrival both = KeyArrivalOf(PartlyByUnits(4, {}), rates);
  EXPECT_EQ(both.In(Lane::kBetween).bytes_per_second, 200e9);
  EXPECT_GT(both.In(Lane::kBetween).delay, both.In(Lane::kInside).delay);
  rates.host_link_bytes_per_second = 1e9;
  rates.link_bytes_per_second = 50e9;
  EXPECT_FALSE(KeyArrivalOf(PartlyByUnits(4, {2, 3}), rates).may_be_late()) << "PCIe";
}

TEST_F(RingMemberTest, CommitFailsInTimeIfPeerDoesNotMeasure) {
  auto member = Make(absl::Milliseconds(200));
  ASSERT_TRUE(member->Prepare(1, 0, 2).ok());
  const absl::Time begin = absl::Now();
  EXPECT_EQ(member->Commit(1, {"me", "peer"}, {}).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
  EXPECT_FALSE(member->formed());
}

// FAILED_PRECONDITION would mean that the commit came too late, and the coordinator would not be
// notified.
TEST_F(RingMemberTest, CommitFailsIfTransportCannotConnect) {
  auto member = Make(absl::Seconds(30));
  transport_.refusal = absl::FailedPreconditionError("memory of rank 1: not mapped");
  ASSERT_TRUE(member->Prepare(1, 0, 2).ok());
  const absl::Status status = member->Commit(1, {"me", "peer"}, {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(status.message(), "memory of rank 1: not mapped");
}

TEST_F(RingMemberTest, CancelEndsMeasuringCommit) {
  auto member = Make(absl::Hours(1));
  ASSERT_TRUE(member->Prepare(7, 0, 2).ok());
  std::thread teardown([&] {
    transport_.measuring.WaitForNotification();
    member->CancelForming(7);
  });
  EXPECT_EQ(member->Commit(7, {"me", "peer"}, {}).status().code(), absl::StatusCode::kCancelled);
  teardown.join();
  EXPECT_FALSE(member->formed());
}

TEST_F(RingMemberTest, CancelAlsoEndsLaterCommit) {
  auto member = Make(absl::Hours(1));
  ASSERT_TRUE(member->Prepare(7, 0, 2).ok());
  member->CancelForming(7);
  EXPECT_EQ(member->Commit(7, {"me", "peer"}, {}).status().code(), absl::StatusCode::kCancelled);
  // A lost coordinator ends all of its generations, but not those of the next coordinator.
  member->CancelForming(std::numeric_limits<uint64_t>::max());
  member->Forget("the coordinator is gone");
  ASSERT_TRUE(member->Prepare(1, 0, 2).ok());
  std::thread peer([&] {
    transport_.measuring.WaitForNotification();
    transport_.peer->Abort("enough");
  });
  EXPECT_EQ(member->Commit(1, {"me", "peer"}, {}).status().code(), absl::StatusCode::kUnavailable);
  peer.join();
}

}  // namespace
}  // namespace ringattn::worker
