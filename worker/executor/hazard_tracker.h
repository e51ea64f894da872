// HazardTracker: turns program order into events. Each operation names the byte
// ranges it reads and writes; it must wait for earlier writers of what it touches
// and for earlier readers of what it writes, and for nothing else. That is all the
// overlap a schedule can have without changing its result.
#ifndef RINGATTN_WORKER_EXECUTOR_HAZARD_TRACKER_H_
#define RINGATTN_WORKER_EXECUTOR_HAZARD_TRACKER_H_

#include <cstdint>
#include <map>
#include <vector>

#include "common/program/program.h"
#include "worker/device/event.h"

namespace ringattn::worker {

struct Access {
  ByteRange range;
  bool write = false;
};

// The order of two operations matters: one writes what the other touches.
bool Conflict(const std::vector<Access>& a, const std::vector<Access>& b);

// Not thread safe.
class HazardTracker {
 public:
  // Events that an operation with these accesses has to wait for, without repeats.
  std::vector<EventRef> Dependencies(const std::vector<Access>& accesses) const;

  // Notes writers from before the first operation, which do not wait for one another.
  void RecordInitial(const ByteRange& range, const std::vector<EventRef>& writers);

  // Notes that `event` ends an operation with these accesses.
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
