// Watchdog: bounds work that might never return. Crash-only: what cannot be ended
// within its bound ends the process, and whoever supervises it starts a new one.
#ifndef RINGATTN_WORKER_SERVICE_WATCHDOG_H_
#define RINGATTN_WORKER_SERVICE_WATCHDOG_H_

#include <functional>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace ringattn::worker {

// Thread safe. One thing is watched at a time.
class Watchdog {
 public:
  // `on_expired` runs on the watchdog's thread, at most once per Arm.
  explicit Watchdog(std::function<void(const std::string& what)> on_expired);
  ~Watchdog();

  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  void Arm(absl::Duration bound, std::string what);
  void Disarm();

 private:
  void Loop();

  const std::function<void(const std::string&)> on_expired_;
  absl::Mutex mutex_;
  absl::CondVar changed_;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time deadline_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  std::string what_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;  // last: starts when the rest is there
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_SERVICE_WATCHDOG_H_
