#include "worker/comm/inproc/inproc_communicator.h"

#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "worker/device/host_queue.h"

namespace ringattn::worker {
namespace {

// A send that waits for its receiver.
struct PendingSend {
  const void* data = nullptr;
  int64_t bytes = 0;
  bool taken = false;
};

// Matches senders and receivers. Thread safe.
class Exchange {
 public:
  absl::Status Run(int rank, const std::vector<PeerTransfer>& group, RunControl* control) {
    // Publishes all sends before the first receive blocks, so two ranks cannot deadlock, whatever
    // the order of transfers in their groups.
    std::vector<std::shared_ptr<PendingSend>> sends;
    {
      absl::MutexLock lock(&mutex_);
      if (aborted_) return AbortedStatus();
      for (const PeerTransfer& transfer : group) {
        if (transfer.kind != PeerTransfer::Kind::kSend) continue;
        sends.push_back(std::make_shared<PendingSend>(PendingSend{transfer.data, transfer.bytes}));
        mailboxes_[{rank, transfer.peer}].push_back(sends.back());
      }
    }
    for (const PeerTransfer& transfer : group) {
      if (transfer.kind != PeerTransfer::Kind::kReceive) continue;
      if (absl::Status status = Receive(rank, transfer); !status.ok()) return status;
      control->progress.fetch_add(1, std::memory_order_relaxed);
    }
    absl::MutexLock lock(&mutex_);
    for (const auto& pending : sends) {
      const auto over = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
        return pending->taken || aborted_;
      };
      mutex_.Await(absl::Condition(&over));
      if (!pending->taken) return AbortedStatus();
      control->progress.fetch_add(1, std::memory_order_relaxed);
    }
    return absl::OkStatus();
  }

  void Abort(const std::string& reason) {
    absl::MutexLock lock(&mutex_);
    if (aborted_) return;
    aborted_ = true;
    reason_ = reason;
  }

 private:
  absl::Status Receive(int rank, const PeerTransfer& transfer) {
    absl::MutexLock lock(&mutex_);
    auto& mailbox = mailboxes_[{transfer.peer, rank}];
    const auto over = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return !mailbox.empty() || aborted_;
    };
    mutex_.Await(absl::Condition(&over));
    if (aborted_) return AbortedStatus();
    const std::shared_ptr<PendingSend> pending = mailbox.front();
    mailbox.pop_front();
    if (pending->bytes != transfer.bytes) {
      return absl::InternalError(absl::StrCat("rank ", transfer.peer, " sends ", pending->bytes,
                                              " bytes where rank ", rank, " receives ",
                                              transfer.bytes));
    }
    // Under the lock: after an abort, a sender must not free the memory during the copy.
    if (pending->bytes > 0) std::memcpy(transfer.data, pending->data, pending->bytes);
    pending->taken = true;
    return absl::OkStatus();
  }

  absl::Status AbortedStatus() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return absl::UnavailableError(absl::StrCat("ring aborted: ", reason_));
  }

  absl::Mutex mutex_;
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<PendingSend>>> mailboxes_
      ABSL_GUARDED_BY(mutex_);  // by {sender, receiver}
  bool aborted_ ABSL_GUARDED_BY(mutex_) = false;
  std::string reason_ ABSL_GUARDED_BY(mutex_);
};

class InProcessCommunicator : public Communicator {
 public:
  InProcessCommunicator(int rank, int world_size, std::shared_ptr<Exchange> exchange)
      : rank_(rank), world_size_(world_size), exchange_(std::move(exchange)) {}

  // Queued groups might otherwise wait for peers that are gone.
  ~InProcessCommunicator() override { exchange_->Abort("a communicator was closed"); }

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  std::string transport(int) const override { return "inproc"; }
  bool takes_compute_units(int) const override { return true; }

  bool has_lanes() const override { return true; }

  EventRef StartInLane(Lane lane, std::vector<PeerTransfer> group, std::vector<EventRef> after,
                       RunControl* control) override {
    return queues_[IndexOf(lane)].Start(
        [this, group = std::move(group), control] {
          absl::Status status = exchange_->Run(rank_, group, control);
          if (!status.ok()) exchange_->Abort(std::string(status.message()));
          return status;
        },
        std::move(after), HostQueue::OnFailure::kRun);
  }

  void Abort(const std::string& reason) override { exchange_->Abort(reason); }

 private:
  const int rank_;
  const int world_size_;
  const std::shared_ptr<Exchange> exchange_;
  HostQueue queues_[kLanes] = {HostQueue("inproc"), HostQueue("inproc_lane1")};
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> MakeInProcessRing(int world_size) {
  auto exchange = std::make_shared<Exchange>();
  std::vector<std::unique_ptr<Communicator>> ring;
  for (int rank = 0; rank < world_size; ++rank) {
    ring.push_back(std::make_unique<InProcessCommunicator>(rank, world_size, exchange));
  }
  return ring;
}

}  // namespace ringattn::worker
