#include "worker/service/watchdog.h"

#include <utility>

namespace ringattn::worker {

Watchdog::Watchdog(std::function<void(const std::string&)> on_expired)
    : on_expired_(std::move(on_expired)), thread_([this] { Loop(); }) {}

Watchdog::~Watchdog() {
  {
    absl::MutexLock lock(&mutex_);
    closing_ = true;
    changed_.Signal();
  }
  thread_.join();
}

void Watchdog::Arm(absl::Duration bound, std::string what) {
  absl::MutexLock lock(&mutex_);
  deadline_ = absl::Now() + bound;
  what_ = std::move(what);
  changed_.Signal();
}

void Watchdog::Disarm() {
  absl::MutexLock lock(&mutex_);
  deadline_ = absl::InfiniteFuture();
}

void Watchdog::Loop() {
  absl::MutexLock lock(&mutex_);
  while (!closing_) {
    if (absl::Now() < deadline_) {
      changed_.WaitWithDeadline(&mutex_, deadline_);
      continue;
    }
    deadline_ = absl::InfiniteFuture();
    const std::string what = what_;
    mutex_.Unlock();
    on_expired_(what);
    mutex_.Lock();
  }
}

}  // namespace ringattn::worker
