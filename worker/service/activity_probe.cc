#include "worker/service/activity_probe.h"

#include <algorithm>

namespace ringattn::worker {

void ActivityProbe::NoteCall(EventRef done) {
  absl::MutexLock lock(&mutex_);
  last_call_ = std::move(done);
}

void ActivityProbe::NoteGroup(Lane lane, std::vector<EventRef> after, EventRef done) {
  absl::MutexLock lock(&mutex_);
  std::deque<Group>& groups = groups_[IndexOf(lane)];
  while (!groups.empty() && groups.front().done->Done()) groups.pop_front();
  groups.push_back({std::move(after), std::move(done)});
}

bool ActivityProbe::WaitsForPeer(const Device& device) const {
  absl::MutexLock lock(&mutex_);
  bool in_flight = false;
  for (std::deque<Group>& groups : groups_) {
    while (!groups.empty() && groups.front().done->Done()) groups.pop_front();
    if (groups.empty()) continue;
    const std::vector<EventRef>& after = groups.front().after;
    in_flight |= std::all_of(after.begin(), after.end(),
                             [](const EventRef& event) { return event->Done(); });
  }
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
  probe_->NoteGroup(lane, std::move(after), done);
  return done;
}

}  // namespace ringattn::worker
