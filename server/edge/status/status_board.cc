#include "server/edge/status/status_board.h"

#include <utility>

#include "common/base/monotonic_time.h"

namespace ringattn::server {

bool StatusBoard::PublishIsDue(absl::Time now) const {
  absl::MutexLock lock(&mutex_);
  return waiting_ > 0 && now - published_at_ >= options_.min_interval;
}

void StatusBoard::Publish(ServerStatus status, absl::Time now) {
  auto newest = std::make_shared<const ServerStatus>(std::move(status));
  absl::MutexLock lock(&mutex_);
  newest_.swap(newest);
  published_at_ = now;
}

std::shared_ptr<const ServerStatus> StatusBoard::Look(absl::Duration patience) {
  const absl::Time from = MonotonicNow() - options_.min_interval;
  absl::MutexLock lock(&mutex_);
  const auto is_new = [this, from] {
    mutex_.AssertHeld();
    return published_at_ > from;
  };
  if (waiting_ >= options_.max_waiting) return newest_;
  ++waiting_;
  mutex_.AwaitWithTimeout(absl::Condition(&is_new), patience);
  --waiting_;
  return newest_;
}

}  // namespace ringattn::server
