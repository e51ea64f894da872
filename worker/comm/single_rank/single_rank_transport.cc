#include "worker/comm/single_rank/single_rank_transport.h"

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "worker/device/host_event.h"

namespace ringattn::worker {
namespace {

constexpr char kBlob[] = "single rank";

// An empty group is done at once; a group with transfers fails, because there is no peer.
class SingleRankCommunicator : public Communicator {
 public:
  int rank() const override { return 0; }
  int world_size() const override { return 1; }
  std::string transport(int) const override { return "none"; }
  bool takes_compute_units(int) const override { return false; }

  EventRef StartInLane(Lane, std::vector<PeerTransfer> group, std::vector<EventRef>,
                       RunControl*) override {
    auto event = std::make_shared<HostEvent>();
    event->Finish(StatusOf(group));
    return event;
  }

  void Abort(const std::string& reason) override {
    absl::MutexLock lock(&mutex_);
    if (aborted_.ok()) aborted_ = absl::UnavailableError(absl::StrCat("ring aborted: ", reason));
  }

 private:
  absl::Status StatusOf(const std::vector<PeerTransfer>& group) const {
    absl::MutexLock lock(&mutex_);
    if (!aborted_.ok() || group.empty()) return aborted_;
    return absl::UnavailableError("a ring of one has no peers");
  }

  mutable absl::Mutex mutex_;
  absl::Status aborted_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

absl::StatusOr<std::string> SingleRankTransport::Prepare(uint64_t generation, int rank,
                                                         int world_size) {
  if (absl::Status status = RingAttempts::Check(rank, world_size); !status.ok()) return status;
  if (world_size > 1) {
    return absl::FailedPreconditionError(
        absl::StrCat("a ring of ", world_size, " needs a transport: ", reason_.message()));
  }
  auto attempt = std::make_shared<RingAttempt>();
  attempt->generation = generation;
  attempt->world_size = world_size;
  attempts_.Prepare(std::move(attempt));
  return kBlob;
}

absl::StatusOr<std::unique_ptr<Communicator>> SingleRankTransport::Connect(
    uint64_t generation, const std::vector<std::string>& blobs, absl::Time) {
  return attempts_.Connect(
      generation, blobs.size(), [&](const RingAttempt&) -> RingAttempts::Joined {
        if (blobs[0] != kBlob)
          return absl::InvalidArgumentError("rank 0's blob is not the one that it returned");
        return std::make_unique<SingleRankCommunicator>();
      });
}

}  // namespace ringattn::worker
