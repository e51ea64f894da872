#include "worker/comm/ring_attempts.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace ringattn::worker {

absl::Status RingAttempts::Check(int rank, int world_size) {
  if (world_size >= 1 && rank >= 0 && rank < world_size) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("rank ", rank, " of ", world_size));
}

void RingAttempts::Prepare(std::shared_ptr<RingAttempt> attempt) {
  absl::MutexLock lock(&mutex_);
  if (prepared_ != nullptr) prepared_->cancelled = true;
  prepared_ = std::move(attempt);
}

RingAttempts::Joined RingAttempts::Connect(
    uint64_t generation, size_t blob_count,
    const std::function<Joined(RingAttempt& attempt)>& join) {
  std::shared_ptr<RingAttempt> attempt;
  {
    absl::MutexLock lock(&mutex_);
    if (prepared_ == nullptr || prepared_->generation != generation) {
      return absl::CancelledError(absl::StrCat("generation ", generation, " is not prepared"));
    }
    attempt = prepared_;
  }
  Joined communicator = absl::InvalidArgumentError(absl::StrCat("a ring of ", attempt->world_size,
                                                                " ranks was prepared, but ",
                                                                blob_count, " blobs were given"));
  if (blob_count == static_cast<size_t>(attempt->world_size)) communicator = join(*attempt);
  absl::MutexLock lock(&mutex_);
  if (prepared_ == attempt) prepared_ = nullptr;
  if (communicator.ok() && attempt->cancelled.load()) {
    return absl::CancelledError("forming the ring was cancelled");
  }
  return communicator;
}

void RingAttempts::Cancel() { Prepare(nullptr); }

}  // namespace ringattn::worker
