// How long a writer waits actively for the response in a step ring before it sleeps.
#ifndef RINGATTN_CLIENT_KV_ACTIVE_WAIT_H_
#define RINGATTN_CLIENT_KV_ACTIVE_WAIT_H_

#include <algorithm>

#include "absl/time/time.h"

namespace ringattn::client {

// Not thread safe.
class ActiveWait {
 public:
  // Longer calls do not gain from it: a wake-up takes tens of microseconds.
  static constexpr absl::Duration kMost = absl::Milliseconds(5);

  // The worker's --kv_spin_us. Zero: no wait is active.
  void SetSpin(absl::Duration spin) { spin_ = duration_ = spin; }
  // After a layer call. The next one probably takes as long, so the wait for it is active for twice
  // this time, but not for less than the spin.
  void NoteDeviceTime(absl::Duration device_time) {
    if (spin_ > absl::ZeroDuration()) {
      duration_ = std::max(spin_, std::min(2 * device_time, kMost));
    }
  }
  absl::Duration duration() const { return duration_; }

 private:
  absl::Duration spin_, duration_;
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_KV_ACTIVE_WAIT_H_
