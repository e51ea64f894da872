// ActivityProbe: observes what the worker is doing: whether it computes and whether it waits for a
// peer. Heartbeats report this, so that the coordinator does not evict a rank that only waits.
#ifndef RINGATTN_WORKER_SERVICE_ACTIVITY_PROBE_H_
#define RINGATTN_WORKER_SERVICE_ACTIVITY_PROBE_H_

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "worker/comm/communicator_wrapper.h"
#include "worker/device/device_wrapper.h"

namespace ringattn::worker {

// Thread safe. Holds its lock only briefly.
class ActivityProbe {
 public:
  void NoteCall(EventRef done);
  void NoteGroup(Lane lane, std::vector<EventRef> after, EventRef done);

  // Returns true if transfers of some lane are in flight (their dependencies are done, they are
  // not) while the device has nothing to compute.
  bool WaitsForPeer(const Device& device) const;

 private:
  struct Group {
    std::vector<EventRef> after;
    EventRef done;
  };

  mutable absl::Mutex mutex_;
  EventRef last_call_ ABSL_GUARDED_BY(mutex_);
  mutable std::deque<Group> groups_[kLanes] ABSL_GUARDED_BY(mutex_);  // in order within a lane
};

// Wraps a device and records what it starts in the probe. As thread safe as the wrapped device.
class ObservedDevice : public DeviceWrapper {
 public:
  ObservedDevice(Device* inner, ActivityProbe* probe) : DeviceWrapper(inner), probe_(probe) {}

  EventRef Start(const PreparedCall& call, StartAfter after, RunControl* control) override;

 private:
  ActivityProbe* const probe_;
};

class ObservedCommunicator : public CommunicatorWrapper {
 public:
  ObservedCommunicator(std::shared_ptr<Communicator> inner, ActivityProbe* probe)
      : CommunicatorWrapper(std::move(inner)), probe_(probe) {}

  EventRef StartInLane(Lane lane, std::vector<PeerTransfer> group, std::vector<EventRef> after,
                       RunControl* control) override;

 private:
  ActivityProbe* const probe_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_SERVICE_ACTIVITY_PROBE_H_
