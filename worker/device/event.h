// Event: the completion of something enqueued. Device and transport work is
// ordered by events alone: `start(after) -> event`. The CPU back end implements
// them as futures (host_event.h), CUDA as stream events.
#ifndef RINGATTN_WORKER_DEVICE_EVENT_H_
#define RINGATTN_WORKER_DEVICE_EVENT_H_

#include <functional>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace ringattn::worker {

// Thread safe.
class Event {
 public:
  virtual ~Event() = default;

  // True once the work has ended, well or not. Never blocks.
  virtual bool Done() const = 0;

  // Blocks the host until Done, at most until `deadline`. The work's own status,
  // or DEADLINE_EXCEEDED.
  virtual absl::Status Wait(absl::Time deadline) const = 0;

  // When the work itself began (everything it waited for was there) and ended.
  // REQUIRES: Done().
  virtual absl::Time begin_time() const = 0;
  virtual absl::Time end_time() const = 0;
};

using EventRef = std::shared_ptr<const Event>;

// What a call is started behind.
struct StartAfter {
  StartAfter() = default;
  StartAfter(std::vector<EventRef> events) : all(std::move(events)) {}
  StartAfter(std::initializer_list<EventRef> events) : all(events) {}

  // All events, for who waits for late keys as for the rest.
  std::vector<EventRef> Joined() && {
    if (bring_keys) {
      for (EventRef& event : std::exchange(bring_keys, {})()) all.push_back(std::move(event));
    }
    return std::move(all);
  }

  std::vector<EventRef> all;  // before anything of the call
  // Enqueues what brings the call's late keys (KvBlock::late), and returns the events before which
  // they are not there. Called once, within Start; a device that takes late keys calls it when it
  // has enqueued the call, which need not wait for it then. Not called by a call that fails at
  // once. Empty: the call has no late keys.
  std::function<std::vector<EventRef>()> bring_keys;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_EVENT_H_
