#include "worker/comm/inproc/inproc_ring_transport.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "common/base/monotonic_time.h"
#include "worker/comm/inproc/inproc_communicator.h"
#include "worker/comm/ring_attempts.h"

namespace ringattn::worker {
namespace {

std::string BlobOf(uint64_t generation, int rank) {
  return absl::StrCat("inproc:", generation, ":", rank);
}

// Connects the ranks. Thread safe.
class Rendezvous {
 public:
  explicit Rendezvous(int world_size) : ranks_(world_size) {}

  int world_size() const { return static_cast<int>(ranks_.size()); }

  void Prepare(int rank, uint64_t generation) {
    absl::MutexLock lock(&mutex_);
    ranks_[rank] = {.prepared = true, .generation = generation};
  }

  void Cancel(int rank) {
    absl::MutexLock lock(&mutex_);
    ranks_[rank] = {};
  }

  absl::StatusOr<std::unique_ptr<Communicator>> Connect(int rank, uint64_t generation,
                                                        const std::vector<std::string>& blobs,
                                                        absl::Time deadline) {
    absl::MutexLock lock(&mutex_);
    Rank& self = ranks_[rank];
    const auto current = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return self.prepared && self.generation == generation;
    };
    if (!current()) return absl::CancelledError("not prepared");
    if (absl::Status status = CheckBlobs(generation, blobs); !status.ok()) {
      self = {};
      return status;
    }
    self.connecting = true;
    if (AllConnecting(generation)) {
      std::vector<std::unique_ptr<Communicator>> ring = MakeInProcessRing(world_size());
      for (int i = 0; i < world_size(); ++i) ranks_[i].communicator = std::move(ring[i]);
    }
    const auto over = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return !current() || self.communicator != nullptr;
    };
    AwaitUntil(mutex_, absl::Condition(&over), deadline);
    if (!current()) return absl::CancelledError("forming the ring was cancelled");
    std::unique_ptr<Communicator> communicator = std::move(self.communicator);
    self = {};
    if (communicator != nullptr) return communicator;
    return absl::UnavailableError("not all ranks took part in time");
  }

 private:
  struct Rank {
    bool prepared = false;
    uint64_t generation = 0;
    bool connecting = false;
    std::unique_ptr<Communicator> communicator;
  };

  absl::Status CheckBlobs(uint64_t generation, const std::vector<std::string>& blobs) const {
    if (static_cast<int>(blobs.size()) != world_size()) {
      return absl::InvalidArgumentError(
          absl::StrCat(blobs.size(), " blobs for ", world_size(), " ranks"));
    }
    for (int rank = 0; rank < world_size(); ++rank) {
      if (blobs[rank] == BlobOf(generation, rank)) continue;
      return absl::InvalidArgumentError(absl::StrCat("rank ", rank, "'s blob is malformed"));
    }
    return absl::OkStatus();
  }

  bool AllConnecting(uint64_t generation) const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return std::all_of(ranks_.begin(), ranks_.end(), [generation](const Rank& rank) {
      return rank.prepared && rank.connecting && rank.generation == generation;
    });
  }

  absl::Mutex mutex_;
  std::vector<Rank> ranks_ ABSL_GUARDED_BY(mutex_);  // constant size
};

class InProcessRingTransport : public RingTransport {
 public:
  InProcessRingTransport(std::shared_ptr<Rendezvous> meeting, int rank)
      : meeting_(std::move(meeting)), rank_(rank) {}
  ~InProcessRingTransport() override { Cancel(); }

  absl::StatusOr<std::string> Prepare(uint64_t generation, int rank, int world_size) override {
    if (absl::Status status = RingAttempts::Check(rank, world_size); !status.ok()) return status;
    if (rank != rank_ || world_size != meeting_->world_size()) {
      return absl::FailedPreconditionError(
          absl::StrCat("made for rank ", rank_, " of ", meeting_->world_size()));
    }
    meeting_->Prepare(rank, generation);
    return BlobOf(generation, rank);
  }
  absl::StatusOr<std::unique_ptr<Communicator>> Connect(uint64_t generation,
                                                        const std::vector<std::string>& blobs,
                                                        absl::Time deadline) override {
    return meeting_->Connect(rank_, generation, blobs, deadline);
  }
  void Cancel() override { meeting_->Cancel(rank_); }

 private:
  const std::shared_ptr<Rendezvous> meeting_;
  const int rank_;
};

}  // namespace

std::vector<std::unique_ptr<RingTransport>> MakeInProcessTransports(int world_size) {
  auto meeting = std::make_shared<Rendezvous>(world_size);
  std::vector<std::unique_ptr<RingTransport>> transports;
  for (int rank = 0; rank < world_size; ++rank) {
    transports.push_back(std::make_unique<InProcessRingTransport>(meeting, rank));
  }
  return transports;
}

}  // namespace ringattn::worker
