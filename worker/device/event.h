// Event: the completion of enqueued work. Device and transport work is ordered by events only:
// `start(after) -> event`. The CPU back end implements events as futures (host_event.h), CUDA as
// stream events.
#ifndef RINGATTN_WORKER_DEVICE_EVENT_H_
#define RINGATTN_WORKER_DEVICE_EVENT_H_

#include <functional>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/base/monotonic_time.h"

namespace ringattn::worker {

// Thread safe.
class Event {
 public:
  virtual ~Event() = default;

  // Returns true once the work has ended, successfully or not. Never blocks.
  virtual bool Done() const = 0;

  // Blocks until Done() or MonotonicNow() reaches `deadline`. Returns the status of the work, or
  // DEADLINE_EXCEEDED.
  virtual absl::Status Wait(absl::Time deadline) const = 0;

  // The times at which the work began, after everything it waited for, and ended, on the clock of
  // MonotonicNow(). REQUIRES: Done().
  virtual absl::Time begin_time() const = 0;
  virtual absl::Time end_time() const = 0;
};

using EventRef = std::shared_ptr<const Event>;

// Longer waits leave the processor to others.
inline constexpr absl::Duration kLongestPolling = absl::Microseconds(500);

// Waits like event.Wait(), but polls first: a thread that sleeps wakes up tens of microseconds
// late.
inline absl::Status PollAndWait(const Event& event) {
  const absl::Time end = MonotonicNow() + kLongestPolling;
  while (!event.Done() && MonotonicNow() < end) {
  }
  return event.Wait(absl::InfiniteFuture());
}

// The events that a call waits for.
struct StartAfter {
  StartAfter() = default;
  StartAfter(std::vector<EventRef> events) : all(std::move(events)) {}
  StartAfter(std::initializer_list<EventRef> events) : all(events) {}

  // Returns all events, for devices that wait for late keys like for everything else.
  std::vector<EventRef> Joined() && {
    if (bring_keys) {
      for (std::vector<EventRef>& arrival : std::exchange(bring_keys, {})()) {
        all.insert(all.end(), arrival.begin(), arrival.end());
      }
    }
    return std::move(all);
  }

  std::vector<EventRef> all;  // before any part of the call
  // The call may begin while the call that was started before it ends. REQUIRES: `all` does not
  // have that call's event, both calls' PreparedCall::adds_atomically is true, and they have no
  // data in common that one of them writes, except sums to which both add.
  bool overlaps_previous = false;
  // Enqueues the transfers of the call's late keys and returns the events that complete them, by
  // arrival (KvBlock::late). Called once, within Start. A device that supports late keys calls it
  // after it has enqueued the call. A call that fails at once does not call it. Empty: the call has
  // no late keys.
  std::function<std::vector<std::vector<EventRef>>()> bring_keys;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_EVENT_H_
