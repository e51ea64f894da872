#include "worker/service/watchdog.h"

#include <utility>

namespace ringattn::worker {

Watchdog::Watchdog(std::function<void(const std::string&)> on_expired)
    : on_expired_(std::move(on_expired)), thread_([this] { Loop(); }) {}

Watchdog::~Watchdog() {
  {
    absl::MutexLock lock(&mutex_);
    closing_ = true;
  }
  changed_.Notify();
  thread_.join();
}

void Watchdog::Arm(absl::Duration bound, std::string what) {
  absl::MutexLock lock(&mutex_);
  deadline_ = MonotonicNow() + bound;
  what_ = std::move(what);
  changed_.Notify();
}

void Watchdog::Disarm() {
  absl::MutexLock lock(&mutex_);
  deadline_ = absl::InfiniteFuture();
}

void Watchdog::Loop() {
  while (true) {
    absl::Duration left;
    std::string what;
    {
      absl::MutexLock lock(&mutex_);
      if (closing_) return;
      left = deadline_ - MonotonicNow();
      what = what_;
      if (left <= absl::ZeroDuration()) deadline_ = absl::InfiniteFuture();
    }
    if (left <= absl::ZeroDuration()) {
      on_expired_(what);
    } else {
      changed_.WaitFor(left);
    }
  }
}

}  // namespace ringattn::worker
