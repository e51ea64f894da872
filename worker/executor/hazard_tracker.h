// HazardTracker: derives event dependencies from program order. Each operation names the byte
// ranges that it reads and writes. It must wait for earlier writers of those ranges and for earlier
// readers of what it writes, and for nothing else. This permits all the overlap that preserves the
// result.
#ifndef RINGATTN_WORKER_EXECUTOR_HAZARD_TRACKER_H_
#define RINGATTN_WORKER_EXECUTOR_HAZARD_TRACKER_H_

#include <cstdint>
#include <map>
#include <vector>

#include "common/program/access.h"
#include "worker/device/event.h"

namespace ringattn::worker {

// Not thread safe.
class HazardTracker {
 public:
  // Returns the events that an operation with these accesses must wait for, without duplicates.
  std::vector<EventRef> Dependencies(const std::vector<Access>& accesses) const;

  // Records writers that precede the first operation. They do not wait for one another.
  void RecordInitial(const ByteRange& range, const std::vector<EventRef>& writers);

  // Records that `event` completes an operation with these accesses.
  void Record(const std::vector<Access>& accesses, const EventRef& event);

 private:
  struct Entry {
    ByteRange range;
    bool write;
    EventRef event;
  };
  std::map<BufferId, std::vector<Entry>> entries_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_EXECUTOR_HAZARD_TRACKER_H_
