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

absl::StatusOr<std::shared_ptr<RingAttempt>> RingAttempts::Begin(uint64_t generation,
                                                                 size_t blob_count) {
  absl::MutexLock lock(&mutex_);
  if (prepared_ == nullptr || prepared_->generation != generation) {
    return absl::CancelledError(absl::StrCat("generation ", generation, " is not prepared"));
  }
  if (blob_count == static_cast<size_t>(prepared_->world_size)) return prepared_;
  const std::shared_ptr<RingAttempt> attempt = std::move(prepared_);
  prepared_ = nullptr;
  return absl::InvalidArgumentError(absl::StrCat("a ring of ", attempt->world_size,
                                                 " ranks was prepared, but ", blob_count,
                                                 " blobs were given"));
}

absl::Status RingAttempts::End(const std::shared_ptr<RingAttempt>& attempt) {
  absl::MutexLock lock(&mutex_);
  if (prepared_ == attempt) prepared_ = nullptr;
  return attempt->cancelled.load() ? absl::CancelledError("forming the ring was cancelled")
                                   : absl::OkStatus();
}

void RingAttempts::Cancel() { Prepare(nullptr); }

}  // namespace ringattn::worker
