#include "worker/service/activity_probe.h"

#include <algorithm>

namespace ringattn::worker {

void ActivityProbe::NoteCall(EventRef done) {
  absl::MutexLock lock(&mutex_);
  last_call_ = std::move(done);
}

void ActivityProbe::NoteGroup(std::vector<EventRef> after, EventRef done) {
  absl::MutexLock lock(&mutex_);
  while (!groups_.empty() && groups_.front().done->Done()) groups_.pop_front();
  groups_.push_back({std::move(after), std::move(done)});
}

bool ActivityProbe::WaitsForPeer(const Device& device) const {
  absl::MutexLock lock(&mutex_);
  while (!groups_.empty() && groups_.front().done->Done()) groups_.pop_front();
  if (groups_.empty()) return false;
  const std::vector<EventRef>& after = groups_.front().after;
  const bool in_flight =
      std::all_of(after.begin(), after.end(), [](const EventRef& event) { return event->Done(); });
  const bool can_compute =
      last_call_ != nullptr && !last_call_->Done() && !device.waits_for_transfer();
  return in_flight && !can_compute;
}

EventRef ObservedDevice::Start(const PreparedCall& call, StartAfter after, RunControl* control) {
  EventRef done = DeviceWrapper::Start(call, std::move(after), control);
  // An operation that preempts has no peers.
  if (!control->preempts) probe_->NoteCall(done);
  return done;
}

EventRef ObservedCommunicator::StartInLane(Lane lane, std::vector<PeerTransfer> group,
                                           std::vector<EventRef> after, RunControl* control) {
  EventRef done = CommunicatorWrapper::StartInLane(lane, std::move(group), after, control);
  probe_->NoteGroup(std::move(after), done);
  return done;
}

}  // namespace ringattn::worker
