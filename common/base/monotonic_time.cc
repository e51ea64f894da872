#include "common/base/monotonic_time.h"

#include <algorithm>
#include <chrono>

#include "absl/time/clock.h"

namespace ringattn {
namespace {

// Longer waits are repeated, so that the conversion to std::chrono cannot overflow.
constexpr absl::Duration kLongestWait = absl::Hours(24);

}  // namespace

absl::Time MonotonicNow() {
  using Clock = std::chrono::steady_clock;
  struct Start {
    absl::Time wall = absl::Now();
    Clock::time_point steady = Clock::now();
  };
  static const Start start;
  return start.wall + absl::FromChrono(Clock::now() - start.steady);
}

absl::Time ToMonotonic(absl::Time wall) {
  if (wall == absl::InfiniteFuture() || wall == absl::InfinitePast()) return wall;
  return MonotonicNow() + (wall - absl::Now());
}

bool AwaitUntil(absl::Mutex& mutex, const absl::Condition& condition, absl::Time deadline) {
  while (true) {
    const absl::Duration left = deadline - MonotonicNow();
    if (mutex.AwaitWithTimeout(condition, left)) return true;
    if (left <= absl::ZeroDuration()) return false;
  }
}

void Wakeup::Notify() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    notified_ = true;
  }
  changed_.notify_one();
}

bool Wakeup::WaitFor(absl::Duration timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  const absl::Time deadline = MonotonicNow() + timeout;
  while (!notified_) {
    const absl::Duration left = deadline - MonotonicNow();
    if (left <= absl::ZeroDuration()) return false;
    changed_.wait_for(lock, absl::ToChronoNanoseconds(std::min(left, kLongestWait)));
  }
  notified_ = false;
  return true;
}

}  // namespace ringattn
