// ActivityProbe: what the worker is doing right now, seen from outside: whether it
// computes, and whether it waits for a peer. The heartbeat reports it, so that a
// rank which merely waits is not blamed for a stall.
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

// Thread safe; its lock is held for moments only.
class ActivityProbe {
 public:
  void NoteCall(EventRef done);
  void NoteGroup(std::vector<EventRef> after, EventRef done);

  // True if transfers are in flight (everything they waited for is done, they are
  // not) while the device has nothing that it could compute.
  bool WaitsForPeer(const Device& device) const;

 private:
  struct Group {
    std::vector<EventRef> after;
    EventRef done;
  };

  mutable absl::Mutex mutex_;
  EventRef last_call_ ABSL_GUARDED_BY(mutex_);
  mutable std::deque<Group> groups_ ABSL_GUARDED_BY(mutex_);
};

// Tells the probe what is started. As thread safe as what it wraps.
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

  EventRef Start(std::vector<PeerTransfer> group, std::vector<EventRef> after,
                 RunControl* control) override;

 private:
  ActivityProbe* const probe_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_SERVICE_ACTIVITY_PROBE_H_
