#include "worker/executor/hazard_tracker.h"

#include <algorithm>

namespace ringattn::worker {
namespace {

bool Covers(const ByteRange& outer, const ByteRange& inner) {
  return outer.offset <= inner.offset && inner.offset + inner.bytes <= outer.offset + outer.bytes;
}

}  // namespace

std::vector<EventRef> HazardTracker::Dependencies(const std::vector<Access>& accesses) const {
  std::vector<EventRef> events;
  for (const Access& access : accesses) {
    const auto found = entries_.find(access.range.buffer);
    if (found == entries_.end()) continue;
    for (const Entry& entry : found->second) {
      if (!Conflict(Access{entry.range, entry.write}, access)) continue;
      // Finished events are kept: one may have failed, and failures must propagate.
      if (std::find(events.begin(), events.end(), entry.event) == events.end()) {
        events.push_back(entry.event);
      }
    }
  }
  return events;
}

void HazardTracker::RecordInitial(const ByteRange& range, const std::vector<EventRef>& writers) {
  for (const EventRef& event : writers) entries_[range.buffer].push_back({range, true, event});
}

void HazardTracker::Record(const std::vector<Access>& accesses, const EventRef& event) {
  for (const Access& access : accesses) {
    if (access.range.bytes == 0) continue;
    std::vector<Entry>& entries = entries_[access.range.buffer];
    if (access.write) {
      // A waiter for this write waits for everything that it replaced.
      entries.erase(std::remove_if(entries.begin(), entries.end(),
                                   [&](const Entry& entry) {
                                     return entry.event != event &&
                                            Covers(access.range, entry.range);
                                   }),
                    entries.end());
    }
    entries.push_back({access.range, access.write, event});
  }
}

}  // namespace ringattn::worker
