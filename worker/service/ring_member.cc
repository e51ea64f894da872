#include "worker/service/ring_member.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/monotonic_time.h"

namespace ringattn::worker {
namespace {

// A kernel that waits for keys occupies the whole device. NVLink (200 GB/s and more) delivers them
// before it has to wait. Over PCIe (below 60 GB/s), separate calls per step lose less.
constexpr double kLateKeysBytesPerSecond = 100e9;
// How far apart members may start a run, plus the time to enqueue a group.
constexpr absl::Duration kStartSkew = absl::Microseconds(50);

}  // namespace

KeyArrival KeyArrivalOf(const Communicator& ring, const RingRates& rates) {
  KeyArrival arrival;
  const auto set = [&arrival](Lane lane, double bytes_per_second, absl::Duration overhead) {
    if (bytes_per_second < kLateKeysBytesPerSecond) return;
    arrival.lanes[IndexOf(lane)] = {bytes_per_second, overhead + kStartSkew};
  };
  set(Lane::kInside, rates.link_bytes_per_second, rates.exchange_overhead);
  set(Lane::kBetween, rates.host_link_bytes_per_second, rates.host_exchange_overhead);
  int with_units = 0;
  for (int peer = 0; peer < ring.world_size(); ++peer) {
    arrival.takes_compute_units.push_back(ring.takes_compute_units(peer));
    with_units += arrival.takes_compute_units.back() && peer != ring.rank() ? 1 : 0;
  }
  return with_units < ring.world_size() - 1 ? arrival : KeyArrival();
}

RingMember::RingMember(RingMemberOptions options, Device* device, RingTransport* transport,
                       OperationRegistry* registry, OperationRunner* runner, ActivityProbe* probe,
                       Watchdog* watchdog)
    : options_(options),
      device_(device),
      transport_(transport),
      registry_(registry),
      runner_(runner),
      probe_(probe),
      watchdog_(watchdog) {}

absl::StatusOr<std::string> RingMember::Prepare(uint64_t generation, int rank, int world_size) {
  TearDown(absl::StrCat("generation ", generation, " is being formed"));
  generation_ = generation;
  rank_ = rank;
  world_size_ = world_size;
  return transport_->Prepare(generation, rank, world_size);
}

absl::StatusOr<RingRates> RingMember::Commit(uint64_t generation,
                                             const std::vector<std::string>& blobs,
                                             const std::vector<int>& hosts, absl::Duration limit) {
  if (generation != generation_ || communicator_ != nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("generation ", generation, " is not the prepared generation ", generation_));
  }
  const absl::Time deadline = MonotonicNow() + std::min(options_.connect_timeout, limit);
  absl::StatusOr<std::unique_ptr<Communicator>> communicator =
      transport_->Connect(generation, blobs, deadline);
  if (absl::IsFailedPrecondition(communicator.status())) {
    // A transport's FAILED_PRECONDITION must not look like a crossed message: this ring cannot be
    // formed, and all members wait.
    return absl::UnavailableError(communicator.status().message());
  }
  if (!communicator.ok()) return communicator.status();
  absl::Status status = SetForming(generation, communicator->get());
  if (!status.ok()) return status;
  const absl::StatusOr<RingRates> rates =
      MeasureRing(**communicator, *device_, options_.memory_limit_bytes / 4, deadline,
                  kMeasurementBudget, hosts);
  status = SetForming(generation, nullptr);
  if (!status.ok()) return status;
  if (!rates.ok()) return rates.status();
  rates_ = *rates;
  communicator_ = std::make_shared<ObservedCommunicator>(*std::move(communicator), probe_);
  hosts_ = hosts;
  runner_->SetCommunicator(communicator_);
  return *rates;
}

KeyArrival RingMember::key_arrival() const {
  return options_.late_keys && formed() ? KeyArrivalOf(*communicator_, rates_) : KeyArrival();
}

absl::Status RingMember::SetForming(uint64_t generation, Communicator* communicator) {
  absl::MutexLock lock(&forming_mutex_);
  const bool cancelled = generation <= cancelled_generation_;
  forming_ = cancelled ? nullptr : communicator;
  return cancelled ? absl::CancelledError("forming the ring was cancelled") : absl::OkStatus();
}

void RingMember::CancelForming(uint64_t generation) {
  transport_->Cancel();
  absl::MutexLock lock(&forming_mutex_);
  cancelled_generation_ = std::max(cancelled_generation_, generation);
  if (forming_ != nullptr) forming_->Abort("forming the ring was cancelled");
}

std::string RingMember::next_transport() const {
  return world_size_ > 1 ? communicator_->transport((rank_ + 1) % world_size_) : "";
}

void RingMember::LosePeer(uint64_t generation, int rank) {
  if (communicator_ == nullptr || generation != generation_) return;
  if (rank < 0 || rank >= world_size_ || rank == rank_) return;
  communicator_->LosePeer(rank, absl::StrCat("rank ", rank, " left the ring"));
}

void RingMember::Forget(const std::string& reason) {
  TearDown(reason);
  generation_ = 0;
  absl::MutexLock lock(&forming_mutex_);
  cancelled_generation_ = 0;
}

void RingMember::TearDown(const std::string& reason) {
  watchdog_->Arm(options_.teardown_timeout,
                 absl::StrCat("tearing down generation ", generation_, " (", reason, ")"));
  // The watchdog fires first if one of these does not return.
  const absl::Time deadline = MonotonicNow() + 2 * options_.teardown_timeout;
  if (communicator_ != nullptr) communicator_->Abort(reason);
  runner_->DropQueued();
  registry_->EndAll(reason);
  runner_->WaitUntilIdle(deadline);
  runner_->SetCommunicator(nullptr);
  communicator_ = nullptr;
  transport_->Cancel();
  registry_->WaitUntilEmpty(deadline);
  watchdog_->Disarm();
}

}  // namespace ringattn::worker
