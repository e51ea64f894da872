// Who is connected, and under which name.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/wire/durations.h"
#include "server/core/failures.h"
#include "server/core/impl.h"

namespace ringattn::server {

void Coordinator::Impl::On(const WorkerJoined& event) {
  if (Connected(event.connection)) return;
  const v1::Register& registration = event.registration;

  std::string refusal;
  if (registration.name().empty()) {
    refusal = "a worker needs a name";
  } else if (!config_.version.empty() && registration.version() != config_.version) {
    refusal = absl::StrCat("version ", registration.version(), " does not match the coordinator's ",
                           config_.version);
  }
  if (!refusal.empty()) {
    v1::Leave* leave = Send(event.connection)->mutable_leave();
    leave->set_reason(refusal);
    leave->set_exit(true);
    Emit(DropWorker{event.connection, refusal});
    return;
  }

  // The old process of this name is dead or about to notice that its stream is.
  std::vector<ConnectionId> replaced;
  for (const auto& [connection, worker] : workers_) {
    if (worker.registration.name() == registration.name()) replaced.push_back(connection);
  }
  for (ConnectionId connection : replaced) {
    LoseWorker(connection, "its name joined again", /*drop=*/true);
  }

  WorkerRecord& worker = workers_[event.connection];
  worker.registration = registration;
  worker.last_heard = now_;
  newest_join_ = now_;
  topology_changed_ = true;
  SetDuration(config_.heartbeat_interval,
              Send(event.connection)->mutable_registered()->mutable_heartbeat_interval());
}

void Coordinator::Impl::On(const WorkerGone& event) {
  LoseWorker(event.connection, "its control stream closed", /*drop=*/false);
}

void Coordinator::Impl::LoseWorker(ConnectionId connection, const std::string& reason, bool drop) {
  if (!Connected(connection)) return;
  const std::optional<int> rank = RankOf(connection);
  const Failure failure = LostFailure(connection, reason);
  if (drop) Emit(DropWorker{connection, reason});
  workers_.erase(connection);
  topology_changed_ = true;
  if (!rank) return;

  ring_.awaited.erase(connection);
  switch (ring_.phase) {
    case RingPhase::kPreparing:
    case RingPhase::kCommitting:
      ++ring_.failed_formings;
      return TearDown();
    case RingPhase::kReady:
      return EndGeneration(failure);
    case RingPhase::kEmpty:
    case RingPhase::kGathering:
    case RingPhase::kTearingDown:
      return;
  }
}

std::optional<int> Coordinator::Impl::RankOf(ConnectionId connection) const {
  const auto found = std::find(ring_.members.begin(), ring_.members.end(), connection);
  if (found == ring_.members.end()) return std::nullopt;
  return static_cast<int>(found - ring_.members.begin());
}

const std::string& Coordinator::Impl::NameOf(ConnectionId connection) const {
  return workers_.at(connection).registration.name();
}

}  // namespace ringattn::server
