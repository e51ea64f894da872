#include "server/core/coordinator.h"

#include <algorithm>

#include "server/core/failures.h"
#include "server/core/impl.h"

namespace ringattn::server {

Coordinator::Coordinator(CoordinatorConfig config)
    : impl_(std::make_unique<Impl>(std::move(config))) {}
Coordinator::~Coordinator() = default;

std::vector<Action> Coordinator::Handle(const Event& event, absl::Time now) {
  return impl_->Handle(event, now);
}
v1::Topology Coordinator::topology() const { return impl_->topology(); }
CoordinatorStats Coordinator::stats() const { return impl_->stats(); }
std::optional<OperationView> Coordinator::FindOperation(const std::string& request_id) const {
  return impl_->FindOperation(request_id);
}

Coordinator::Impl::Impl(CoordinatorConfig config) : config_(std::move(config)) {
  ring_.generation = config_.initial_generation;
}

std::vector<Action> Coordinator::Impl::Handle(const Event& event, absl::Time now) {
  if (now_ == absl::InfinitePast()) now_ = started_at_ = now;
  // Ten missed ticks are no jitter: this process was stopped or starved.
  const absl::Duration gap = now - now_;
  if (gap > 10 * config_.tick_interval) ForgivePause(gap);
  now_ = std::max(now_, now);
  std::visit([this](const auto& value) { On(value); }, event);
  const bool only_progress = std::holds_alternative<UploadProgressed>(event) ||
                             std::holds_alternative<DownloadProgressed>(event) ||
                             std::holds_alternative<MembersStandStill>(event);
  if (!only_progress) Settle();
  return std::exchange(actions_, {});
}

void Coordinator::Impl::On(const WorkerSaid& event) {
  const auto worker = workers_.find(event.connection);
  if (worker == workers_.end()) return;
  worker->second.last_heard = now_;
  const v1::JoinRequest& message = event.message;
  switch (message.message_case()) {
    case v1::JoinRequest::kHeartbeat:
      return OnHeartbeat(event.connection, message.heartbeat());
    case v1::JoinRequest::kPrepared:
      return OnPrepared(event.connection, message.prepared());
    case v1::JoinRequest::kCommitted:
      return OnCommitted(event.connection, message.committed());
    case v1::JoinRequest::kTornDown:
      return OnTornDown(event.connection, message.torn_down());
    case v1::JoinRequest::kReserved:
      return OnReserved(event.connection, message.reserved());
    case v1::JoinRequest::kUploaded:
      return OnUploaded(event.connection, message.uploaded());
    case v1::JoinRequest::kFinished:
      return OnFinished(event.connection, message.finished());
    case v1::JoinRequest::kReleased:
      return OnReleased(event.connection, message.released());
    case v1::JoinRequest::kGenerationFailed:
      return OnGenerationFailed(event.connection, message.generation_failed());
    case v1::JoinRequest::kRegister:  // once only, by WorkerJoined
    case v1::JoinRequest::MESSAGE_NOT_SET:
      return;
  }
}

void Coordinator::Impl::On(const Tick&) {
  CheckSilence();
  CheckSuspicion();
  CheckProgress();
  CheckOperationTimers();
  CheckRequestTimers();
}

void Coordinator::Impl::On(const DrainRequested& event) {
  draining_ = !event.undo;
  drain_unanswered_ = draining_;
  topology_changed_ = true;
}

void Coordinator::Impl::Settle() {
  AdvanceRing();
  StartDueRuns();
  AdmitQueued();
  ReportChanges();
}

void Coordinator::Impl::ReportChanges() {
  const bool serving = ring_.phase == RingPhase::kReady && !draining_;
  if (serving != serving_reported_) {
    serving_reported_ = serving;
    Emit(ServingChanged{serving});
  }
  std::map<ConnectionId, int64_t> reserved = ReservedByWorker();
  const bool memory_changed = reserved != reserved_reported_;
  if (topology_changed_ || memory_changed) Emit(TopologyChanged{!topology_changed_});
  topology_changed_ = false;
  reserved_reported_ = std::move(reserved);
  if (drain_unanswered_ && requests_.empty() && operations_.empty()) {
    drain_unanswered_ = false;
    Emit(DrainCompleted{});
  }
}

void Coordinator::Impl::ForgivePause(absl::Duration pause) {
  for (auto& [connection, worker] : workers_) worker.last_heard += pause;
  ring_.deadline += pause;
  ring_lost_at_ += pause;
  ringless_since_ += pause;
  if (ring_.suspicion) {
    ring_.suspicion->opened += pause;
    ring_.suspicion->closes += pause;
  }
  for (auto& [id, operation] : operations_) {
    operation.phase_since += pause;
    operation.last_advance += pause;
    operation.pending_failure_due += pause;
    for (Member& member : operation.members) {
      if (member.stands_since) *member.stands_since += pause;
    }
  }
}

v1::JoinResponse* Coordinator::Impl::Send(ConnectionId connection) {
  Emit(SendToWorker{connection, {}});
  return &std::get<SendToWorker>(actions_.back()).message;
}

}  // namespace ringattn::server
