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

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_EVENT_H_
