#include "worker/service/activity_probe.h"

#include "gtest/gtest.h"
#include "worker/device/host_call.h"
#include "worker/device/host_event.h"

namespace ringattn::worker {
namespace {

// The test decides when calls and groups end.
class ManualDevice : public Device {
 public:
  absl::StatusOr<std::unique_ptr<DeviceBuffer>> Allocate(int64_t) override {
    return absl::UnimplementedError("this device has no memory");
  }
  absl::StatusOr<PreparedCalls> Prepare(std::vector<KernelCall>) override {
    return absl::UnimplementedError("the test starts the calls");
  }
  EventRef Start(const PreparedCall&, StartAfter, RunControl*) override { return call; }
  bool waits_for_transfer() const override { return waits; }
  absl::Status CopyFromHost(void*, const void*, int64_t) override { return absl::OkStatus(); }
  absl::Status CopyToHost(void*, const void*, int64_t) override { return absl::OkStatus(); }
  std::string description() const override { return "manual"; }

  std::shared_ptr<HostEvent> call = std::make_shared<HostEvent>();
  bool waits = false;
};

class ManualCommunicator : public Communicator {
 public:
  int rank() const override { return 0; }
  int world_size() const override { return 2; }
  std::string transport(int) const override { return "manual"; }
  bool takes_compute_units(int) const override { return true; }
  EventRef StartInLane(Lane, std::vector<PeerTransfer>, std::vector<EventRef>,
                       RunControl*) override {
    return group;
  }
  void Abort(const std::string&) override {}

  std::shared_ptr<HostEvent> group = std::make_shared<HostEvent>();
};

struct Probed {
  ManualDevice device;
  std::shared_ptr<ManualCommunicator> communicator = std::make_shared<ManualCommunicator>();
  ActivityProbe probe;
  ObservedDevice observed_device{&device, &probe};
  ObservedCommunicator observed_communicator{communicator, &probe};
  RunControl control;
  const HostCall zero{ZeroCall{}, KernelName{}, nullptr};  // ManualDevice does not start it

  bool Waits() const { return probe.WaitsForPeer(device); }
};

TEST(ActivityProbe, IdleRankDoesNotWaitForPeer) { EXPECT_FALSE(Probed().Waits()); }

// The other lane's group still waits for a call, and its order does not matter here.
TEST(ActivityProbe, WaitsIfTransfersOfOneLaneAreInFlight) {
  Probed p;
  const auto own = std::make_shared<HostEvent>();
  p.observed_communicator.StartInLane(Lane::kBetween, {}, {own}, &p.control);
  EXPECT_FALSE(p.Waits());
  p.observed_communicator.StartInLane(Lane::kInside, {}, {}, &p.control);
  EXPECT_TRUE(p.Waits());
}

TEST(ActivityProbe, WaitsIfTransfersAreInFlightAndNothingCanCompute) {
  Probed p;
  p.observed_communicator.Start({}, {}, &p.control);
  EXPECT_TRUE(p.Waits());
  p.observed_device.Start(p.zero, {}, &p.control);
  EXPECT_FALSE(p.Waits()) << "it computes during the transfer";
  p.device.waits = true;
  EXPECT_TRUE(p.Waits()) << "the call itself waits for the transfer";
  p.device.waits = false;
  p.device.call->Finish(absl::OkStatus());
  EXPECT_TRUE(p.Waits());
  p.communicator->group->Finish(absl::OkStatus());
  EXPECT_FALSE(p.Waits());
}

TEST(ActivityProbe, TransferAfterOwnComputeIsNotWaiting) {
  Probed p;
  auto own = std::make_shared<HostEvent>();
  p.observed_communicator.Start({}, {own}, &p.control);
  EXPECT_FALSE(p.Waits());
  own->Finish(absl::OkStatus());
  EXPECT_TRUE(p.Waits());
}

// A dropped step: the device waits, but no transfer is in flight, so this rank caused the stall.
TEST(ActivityProbe, WaitingForUnstartedTransferIsNotWaitingForPeer) {
  Probed p;
  p.observed_device.Start(p.zero, {}, &p.control);
  p.device.waits = true;
  EXPECT_FALSE(p.Waits());
}

}  // namespace
}  // namespace ringattn::worker
