// Watchdog: bounds work that might never return. If the work does not end in time, the process
// exits and its supervisor starts a new one (crash-only design).
#ifndef RINGATTN_WORKER_SERVICE_WATCHDOG_H_
#define RINGATTN_WORKER_SERVICE_WATCHDOG_H_

#include <functional>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/base/monotonic_time.h"

namespace ringattn::worker {

// Thread safe. Watches one piece of work at a time.
class Watchdog {
 public:
  // Calls `on_expired` on the watchdog's thread, at most once per Arm.
  explicit Watchdog(std::function<void(const std::string& what)> on_expired);
  ~Watchdog();

  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  void Arm(absl::Duration bound, std::string what);
  void Disarm();

 private:
  void Loop();

  const std::function<void(const std::string&)> on_expired_;
  Wakeup changed_;  // after Arm(), and at the end
  absl::Mutex mutex_;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time deadline_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  std::string what_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;  // last: starts when the other members exist
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_SERVICE_WATCHDOG_H_
