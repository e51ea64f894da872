#include "worker/device/host_event.h"

#include <utility>

#include "common/base/monotonic_time.h"

namespace ringattn::worker {

void HostEvent::Begin() {
  absl::MutexLock lock(&mutex_);
  begin_ = MonotonicNow();
}

void HostEvent::Finish(absl::Status status) {
  absl::MutexLock lock(&mutex_);
  end_ = MonotonicNow();
  if (begin_ == absl::InfinitePast()) begin_ = end_;
  status_ = std::move(status);
  done_ = true;
}

bool HostEvent::Done() const {
  absl::MutexLock lock(&mutex_);
  return done_;
}

absl::Status HostEvent::Wait(absl::Time deadline) const {
  absl::MutexLock lock(&mutex_);
  if (!AwaitUntil(mutex_, absl::Condition(&done_), deadline)) {
    return absl::DeadlineExceededError("the work has not ended in time");
  }
  return status_;
}

absl::Time HostEvent::begin_time() const {
  absl::MutexLock lock(&mutex_);
  return begin_;
}

absl::Time HostEvent::end_time() const {
  absl::MutexLock lock(&mutex_);
  return end_;
}

}  // namespace ringattn::worker
