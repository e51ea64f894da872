#include "tests/simulation/checker.h"

#include <algorithm>

namespace ringattn::server::simulation {

void Checker::OnCoordinatorStarted(const Coordinator* core) {
  core_ = core;
  torn_down_ = true;
  members_.clear();
  operations_.clear();
  lost_.clear();
}

void Checker::OnWorkerSaid(const WorkerMessage& said) {
  if (dropped_.count(said.connection) > 0) return;
  const v1::JoinRequest& message = said.message;
  if (message.has_prepared() && message.prepared().generation() == generation_) {
    prepared_.insert(said.connection);
  }
  const auto note = [&](const auto& answer, std::set<ConnectionId> Operation::*who) {
    const auto found = operations_.find(answer.operation_id());
    if (found != operations_.end() && answer.generation() == generation_) {
      (found->second.*who).insert(said.connection);
    }
  };
  if (message.has_reserved() && message.reserved().ok()) {
    note(message.reserved(), &Operation::reserved);
  }
  if (message.has_uploaded()) note(message.uploaded(), &Operation::uploaded);
  if (message.has_finished()) note(message.finished(), &Operation::finished);
  if (message.has_finished() && !message.finished().ok() && !message.finished().cancelled()) {
    note(message.finished(), &Operation::failed);
  }
  if (message.has_generation_failed()) note(message.generation_failed(), &Operation::failed);
  if (message.finished().has_reserved()) note(message.finished(), &Operation::reserved);
}

void Checker::OnAction(const Action& action) {
  if (const auto* send = std::get_if<SendToWorker>(&action)) {
    On(send->connection, send->message);
  } else if (const auto* drop = std::get_if<DropWorker>(&action)) {
    dropped_.insert(drop->connection);
  } else if (const auto* accept = std::get_if<AcceptRequest>(&action)) {
    On(*accept);
  } else if (const auto* begin = std::get_if<BeginDownload>(&action)) {
    On(*begin);
  } else if (const auto* finish = std::get_if<FinishRequest>(&action)) {
    EndStream(finish->stream);
    outlived_ += !lost_.empty() && !torn_down_;
  } else if (const auto* fail = std::get_if<FailRequest>(&action)) {
    EndStream(fail->stream);
    CheckLoss(*fail);
  } else if (const auto* changed = std::get_if<StateChanged>(&action)) {
    if (ended_.count(changed->stream) > 0) {
      world_->Violate("stream ", changed->stream, " changed its state after its end");
    }
  } else if (const auto* lost = std::get_if<LostWorker>(&action)) {
    ++unlogged_losses_[lost->worker];
    if (lost->rank && !torn_down_) {
      if (lost_.empty()) first_loss_ = world_->now();
      lost_.insert(members_.at(*lost->rank));
    }
  } else if (const auto* event = std::get_if<LossEvent>(&action)) {
    On(*event);
  } else if (const auto* reach = std::get_if<ReachChanged>(&action)) {
    world_->Trace(reach->a, reach->reached ? " reaches " : " is parted from ", reach->b, ": ",
                  reach->detail);
    if (!reach->reached && !world_->fault_injected) world_->Violate("parted without a fault");
  } else if (const auto* serving = std::get_if<ServingChanged>(&action)) {
    const bool ready = core_->topology().state() == v1::RING_STATE_READY;
    if (serving->serving != ready) world_->Violate("serving without a ring, or the reverse");
  }
}

void Checker::On(ConnectionId connection, const v1::JoinResponse& message) {
  if (dropped_.count(connection) > 0) {
    return world_->Violate("message to dropped connection ", connection);
  }
  if (message.has_prepare()) {
    const v1::Prepare& prepare = message.prepare();
    if (prepare.rank() == 0) {
      for (ConnectionId member : members_) {
        if (!torn_down_ && dropped_.count(member) + gone_.count(member) == 0) {
          world_->Violate("Prepare while generation ", generation_, " lives");
        }
      }
      if (prepare.generation() <= generation_) world_->Violate("generations do not grow");
      generation_ = prepare.generation();
      ++formings_;
      torn_down_ = false;
      members_.clear();
      prepared_.clear();
      operations_.clear();
      lost_.clear();
    }
    if (prepare.rank() != members_.size()) world_->Violate("ranks out of order");
    members_.push_back(connection);
    return;
  }
  if (message.has_commit()) {
    if (prepared_.size() != members_.size()) world_->Violate("Commit before all prepared");
    return;
  }
  if (message.has_teardown()) {
    torn_down_ = true;
    operations_.clear();
    return;
  }
  if (message.has_registered() || message.has_leave() || message.has_probe()) return;
  if (message.has_drop_residuals()) return;  // of no generation
  if (message.has_expect_region() || message.has_forget_region()) return;
  if (message.has_kv_reserve() || message.has_kv_open() || message.has_kv_settle() ||
      message.has_kv_free()) {
    return;
  }

  if (torn_down_) world_->Violate("an operation's message outside a generation");
  if (message.has_reserve()) {
    const v1::Reserve& reserve = message.reserve();
    Operation& operation = operations_[reserve.operation_id()];
    operation.members.push_back(connection);
    operation.tokens.push_back(reserve.token());
    if (!reserve.token().empty() && !tokens_.insert(reserve.token()).second) {
      world_->Violate("a token is used again for ", reserve.operation_id());
    }
    const size_t ring_rank = operation.members.size() - 1;
    const bool matches = ring_rank < static_cast<size_t>(reserve.members_size()) &&
                         reserve.members(ring_rank) < members_.size() &&
                         members_[reserve.members(ring_rank)] == connection;
    if (!matches) world_->Violate("Reserve of ", reserve.operation_id(), " to a wrong member");
    operation.only_prepared = reserve.has_prepare_only();
    operation.in_memory = !reserve.places().empty();
    operation.runs_by_itself =
        !reserve.places().empty() && (reserve.has_inline_run() || reserve.has_run_when_uploaded());
    if (reserve.has_inline_run()) {
      OnRun(connection, reserve.operation_id(), reserve.inline_run().has_preempt_after());
    }
  } else if (message.has_run()) {
    const std::string& id = message.run().operation_id();
    Operation& operation = operations_[id];
    if (!operation.accepted) world_->Violate("Run of ", id, " before it was accepted");
    if (operation.uploaded.size() != operation.members.size()) {
      world_->Violate("Run of ", id, " before all have uploaded");
    }
    OnRun(connection, id, message.run().has_preempt_after());
  } else if (message.has_release()) {
    const Operation& operation = operations_[message.release().operation_id()];
    if (operation.only_prepared && operation.accepted) {
      world_->Violate("Release of ", message.release().operation_id(), ", which is kept");
    }
    if (!operation.runs_by_itself && operation.run.count(connection) > 0 &&
        operation.finished.count(connection) == 0 && operation.failed.count(connection) == 0) {
      world_->Violate("Release of ", message.release().operation_id(), " before Finished");
    }
  }
}

// One global order: an operation's place is given at its first Run, and every worker's places must
// grow. Runs that preempt have no peers and a separate order.
void Checker::OnRun(ConnectionId connection, const std::string& id, bool preempts) {
  Operation& operation = operations_[id];
  if (operation.only_prepared) world_->Violate("Run of ", id, ", which is only prepared");
  if (!operation.run.insert(connection).second) world_->Violate("Run of ", id, " twice");
  if (operation.run_sequence == 0) operation.run_sequence = ++runs_;
  if (preempts && operation.members.size() != 1) world_->Violate(id, " preempts with peers");
  uint64_t& last = (preempts ? last_preempting_run_ : last_run_)[connection];
  if (operation.run_sequence <= last) world_->Violate("Run of ", id, " out of order");
  last = operation.run_sequence;
}

void Checker::On(const AcceptRequest& accept) {
  Operation& operation = operations_[accept.operation_id];
  if (accept.generation != generation_ || torn_down_) {
    world_->Violate("accepted ", accept.operation_id, " outside the current generation");
  }
  if (operation.accepted || !accepted_.emplace(accept.stream, accept.operation_id).second) {
    world_->Violate("stream ", accept.stream, " accepted twice");
  }
  operation.accepted = true;
  std::vector<ConnectionId> members;
  for (const RingMember& member : accept.members) members.push_back(member.connection);
  if (members != operation.members) world_->Violate("accepted with members not asked to reserve");
  std::vector<std::string> tokens;
  for (const RingMember& member : accept.members) tokens.push_back(member.token);
  if (tokens != operation.tokens) world_->Violate("accepted with tokens that members do not know");
  for (ConnectionId member : members) {
    if (dropped_.count(member) > 0 || operation.reserved.count(member) == 0) {
      world_->Violate("accepted ", accept.operation_id, " without memory on ", member);
    }
  }
}

void Checker::On(const BeginDownload& begin) {
  const Operation& operation = operations_[accepted_[begin.stream]];
  const auto& done = operation.only_prepared ? operation.reserved : operation.finished;
  if (done.size() != operation.members.size()) {
    world_->Violate("download of ", accepted_[begin.stream], " before all have finished");
  }
}

void Checker::OnHostDies(const std::string& host, const std::vector<std::string>& workers,
                         bool silently) {
  dead_host_ = host;
  dead_workers_ = {workers.begin(), workers.end()};
  // A stalled run may be blamed on a silent worker before it counts as silent.
  single_events_allowed_ = silently ? 1 : 0;
}

// Each loss is in one event, and those of a host that dies are in the same one.
void Checker::On(const LossEvent& event) {
  std::set<std::string> workers;
  for (const LostWorker& loss : event.workers) {
    workers.insert(loss.worker);
    if (--unlogged_losses_[loss.worker] < 0) world_->Violate(loss.worker, " is lost in two events");
  }
  if (event.host.empty() != (event.workers.size() == 1)) world_->Violate("a loss of no whole host");
  if (dead_workers_.count(*workers.begin()) == 0) return;
  if (event.workers.size() < dead_workers_.size()) {
    if (--single_events_allowed_ < 0) world_->Violate(dead_host_, " is lost in several events");
    for (const std::string& worker : workers) dead_workers_.erase(worker);
    return;
  }
  if (workers != dead_workers_) world_->Violate("others are lost with ", dead_host_);
  dead_workers_.clear();
}

// A lost worker ends only the operations that it serves, until the limit on the others has passed.
void Checker::CheckLoss(const FailRequest& fail) {
  if (fail.failure.reason != "WORKER_LOST") return;
  const auto accepted = accepted_.find(fail.stream);
  if (accepted == accepted_.end()) return;  // inline
  const auto found = operations_.find(accepted->second);
  if (found == operations_.end()) return;
  const Operation& operation = found->second;
  const bool was_served = std::any_of(operation.members.begin(), operation.members.end(),
                                      [this](ConnectionId one) { return lost_.count(one) > 0; });
  const bool exchanges = operation.members.size() > 1;
  const bool broke = !operation.failed.empty() || (exchanges && !isolates_peers_);
  const bool late = world_->now() >= first_loss_ + config_.loss_drain_timeout;
  // A blamed worker that may write into a client's memory stops with the ring.
  const bool may_write =
      std::any_of(operations_.begin(), operations_.end(), [&](const auto& entry) {
        const std::vector<ConnectionId>& on = entry.second.members;
        return entry.second.in_memory &&
               std::any_of(on.begin(), on.end(),
                           [this](ConnectionId one) { return lost_.count(one) > 0; });
      });
  if (was_served || broke || late || may_write) return;
  world_->Violate("stream ", fail.stream, ": ", accepted->second, " ended with another worker");
}

void Checker::EndStream(StreamId stream) {
  if (!ended_.insert(stream).second) world_->Violate("stream ", stream, " ended twice");
}

void Checker::OnSettled() {
  const CoordinatorStats stats = core_->stats();
  // Operations that were reserving when the ring broke queue again and may exceed the bound.
  const int64_t reserving = static_cast<int64_t>(kMaxWorkers) * config_.max_operations_per_worker;
  if (stats.queued_requests > config_.limits.max_queued_requests + reserving) {
    world_->Violate(stats.queued_requests, " requests wait");
  }
  if (stats.queued_requests == 0 && stats.queued_bytes != 0) {
    world_->Violate("an empty queue of ", stats.queued_bytes, " bytes");
  }
  if (stats.active_requests == 0 && stats.queued_requests < 0) world_->Violate("negative counts");
}

}  // namespace ringattn::server::simulation
