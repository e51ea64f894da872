// Event: the completion of something enqueued. Device and transport work is
// ordered by events alone: `start(after) -> event`. The CPU back end implements
// them as futures (host_event.h), CUDA as stream events.
#ifndef RINGATTN_WORKER_DEVICE_EVENT_H_
#define RINGATTN_WORKER_DEVICE_EVENT_H_

#include <memory>

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

  // Both, for who waits for them alike.
  std::vector<EventRef> Joined() && {
    all.insert(all.end(), late_keys.begin(), late_keys.end());
    return std::move(all);
  }

  std::vector<EventRef> all;  // before anything of the call
  // Before its late keys are read (KvBlock::late): transfers that bring them. A device may start
  // the call before these, if it said that it takes late keys.
  std::vector<EventRef> late_keys;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_EVENT_H_
