// Time for intervals and timeouts. The wall clock (absl::Now) may be set while the process runs;
// the monotonic clock may not.
//
//   const absl::Time due = MonotonicNow() + timeout;
//   ...
//   if (MonotonicNow() > due) return Late();
#ifndef RINGATTN_COMMON_BASE_MONOTONIC_TIME_H_
#define RINGATTN_COMMON_BASE_MONOTONIC_TIME_H_

#include <condition_variable>
#include <mutex>

#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace ringattn {

// Returns the wall time at which the process first called it, plus the monotonic time since then.
// Never goes back. Values of two processes are not comparable. Do not pass it where a wall time is
// expected, such as absl::Mutex::AwaitWithDeadline or a gRPC deadline. Thread safe.
absl::Time MonotonicNow();

// Converts a wall time, such as a gRPC deadline, at the present offset of the two clocks.
absl::Time ToMonotonic(absl::Time wall);

// Waits until the condition holds or MonotonicNow() reaches `deadline`. Returns the condition.
// REQUIRES: `mutex` is held. A clock that is set back during the wait can prolong the wait, because
// absl::Mutex waits on the wall clock. Loops that must not stop use Wakeup.
bool AwaitUntil(absl::Mutex& mutex, const absl::Condition& condition, absl::Time deadline);

// Wakes one waiting thread. Its timeouts are measured on the monotonic clock. Thread safe.
class Wakeup {
 public:
  // Ends the current wait, or the next one if no thread waits.
  void Notify();
  // Returns true if Notify() ended the wait, false after `timeout`.
  bool WaitFor(absl::Duration timeout);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool notified_ = false;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_BASE_MONOTONIC_TIME_H_
