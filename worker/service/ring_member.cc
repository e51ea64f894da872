#include "worker/service/ring_member.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace ringattn {

RingMember::RingMember(RingMemberOptions options, RingTransport* transport,
                       OperationRegistry* registry, OperationRunner* runner, ActivityProbe* probe,
                       Watchdog* watchdog)
    : options_(options),
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

absl::Status RingMember::Commit(uint64_t generation, const std::vector<std::string>& blobs) {
  if (generation != generation_ || communicator_ != nullptr) {
    return absl::FailedPreconditionError(absl::StrCat("generation ", generation,
                                                      " is not the one that is prepared, ",
                                                      generation_));
  }
  absl::StatusOr<std::unique_ptr<Communicator>> communicator =
      transport_->Connect(generation, blobs, absl::Now() + options_.connect_timeout);
  if (!communicator.ok()) return communicator.status();
  communicator_ = std::make_shared<ObservedCommunicator>(*std::move(communicator), probe_);
  runner_->SetCommunicator(communicator_);
  return absl::OkStatus();
}

void RingMember::Forget(const std::string& reason) {
  TearDown(reason);
  generation_ = 0;
}

void RingMember::TearDown(const std::string& reason) {
  watchdog_->Arm(options_.teardown_timeout,
                 absl::StrCat("tearing down generation ", generation_, " (", reason, ")"));
  // The watchdog acts first if one of these does not return.
  const absl::Time deadline = absl::Now() + 2 * options_.teardown_timeout;
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

}  // namespace ringattn
