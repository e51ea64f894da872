#include "worker/comm/wire/wire_communicator.h"

#include <utility>

namespace ringattn::worker {

WireCommunicator::WireCommunicator(int rank, int world_size, WireStreams streams,
                                   absl::Duration step_timeout,
                                   std::shared_ptr<WireCounters> counters)
    : rank_(rank),
      world_size_(world_size),
      step_timeout_(step_timeout),
      engine_(rank, std::move(streams), std::move(counters)) {}

WireCommunicator::~WireCommunicator() {
  // Queued groups might otherwise wait for peers that are gone.
  engine_.Abort("the communicator was closed");
}

EventRef WireCommunicator::StartInLane(Lane lane, std::vector<PeerTransfer> group,
                                       std::vector<EventRef> after, RunControl* control) {
  return queues_[IndexOf(lane)].Start(
      [this, lane, group = std::move(group), control] {
        return engine_.Run(lane, group, step_timeout_, &control->progress);
      },
      std::move(after), HostQueue::OnFailure::kRun);
}

}  // namespace ringattn::worker
