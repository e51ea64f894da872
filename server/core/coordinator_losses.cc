// Coordinator: lost workers, and the end of a generation.
//
// The loss of a ring member ends the operations that it serves. Others that are past admission run
// on, within loss_drain_timeout, before the generation ends and the next ring forms.
#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "server/core/coordinator_impl.h"
#include "server/core/requests/client_failures.h"

namespace ringattn::server {

using Phase = Operation::Phase;

void Coordinator::Impl::LoseWorker(ConnectionId connection, LossReason reason,
                                   const std::string& detail, bool drop) {
  if (!roster_.Has(connection)) return;
  const bool is_member = ring_.RankOf(connection).has_value();
  const Failure failure = LostFailure(connection, detail);
  const LostWorker loss = NoteLoss(connection, reason, detail, OthersRunOn(connection));
  if (drop) batch_.Emit(DropWorker{connection, detail});
  const std::string name = roster_.NameOf(connection);
  const std::string host = roster_.at(connection).registration.location().host();
  roster_.Remove(connection);
  host_losses_.Add(loss, host);
  regions_.OnWorkerLost(connection);
  kv_caches_.OnWorkerLost(connection, name);
  topology_changed_ = true;
  if (is_member && ring_.has_operations()) {
    LoseMember(connection, failure);
  } else if (is_member) {
    ring_.OnMemberFailed(connection);
  }
  EndReaders(residuals_.OnWorkerLost(connection), ResidualEnd::kLost);
}

// Must run while the ring still knows the worker's rank.
LostWorker Coordinator::Impl::NoteLoss(ConnectionId connection, LossReason reason,
                                       const std::string& detail, bool others_run_on) {
  const std::optional<int> rank = ring_.has_operations() ? ring_.RankOf(connection) : std::nullopt;
  const v1::Register& registration = roster_.at(connection).registration;
  LostWorker loss{batch_.now(), registration.name(), registration.device(),
                  rank,         ring_.generation(),  reason,
                  detail};
  if (rank) {
    loss.ended_requests = others_run_on ? operations_.accepted_requests_on(connection)
                                        : operations_.accepted_requests();
  }
  losses_.Add(loss);
  batch_.Emit(loss);
  return loss;
}

Failure Coordinator::Impl::LostFailure(ConnectionId connection, const std::string& reason) const {
  return WorkerLost(ring_.RankOf(connection).value_or(-1), roster_.NameOf(connection), reason,
                    config_.retry_after);
}

void Coordinator::Impl::LoseMember(ConnectionId connection, const Failure& failure) {
  // A blamed worker stays connected until the next ring forms. It may still write into the memory
  // of its clients, and only Teardown stops it.
  const bool may_write = roster_.Has(connection) && operations_.CopiesOn(connection);
  if (may_write || !OthersRunOn(connection)) return EndGeneration(failure);
  lost_at_ = batch_.now();
  if (!ring_.ending()) BeginEnding(failure);
  EndOperationsOn(connection, failure);
}

// Returns whether operations without the worker may run on after its loss.
bool Coordinator::Impl::OthersRunOn(ConnectionId lost) const {
  if (ring_.ending()) return true;
  if (!ring_.ready() || config_.loss_drain_timeout <= absl::ZeroDuration()) return false;
  const auto& all = operations_.all();
  return std::any_of(all.begin(), all.end(), [lost](const auto& entry) {
    return Operations::Outlives(entry.second, lost);
  });
}

// Requests that are not past admission wait for the next ring.
void Coordinator::Impl::BeginEnding(const Failure& failure) {
  loss_failure_ = failure;
  ending_since_ = batch_.now();
  completed_ending_ = 0;
  ring_.BeginEnding();
  suspicion_.Close();
  for (const auto& [stream, entry] : queue_.entries()) StopPlanning(*requests_.Find(stream));
}

void Coordinator::Impl::EndOperationsOn(ConnectionId lost, const Failure& failure) {
  std::set<ConnectionId> informed;
  for (const std::string& id : operations_.OperationsOn(lost)) {
    Operation& operation = *operations_.Find(id);
    operations_.LoseMember(operation, lost);
    operations_.FinishFailedRuns(operation);
    for (const Operation::Member& member : operation.members) {
      // Its exchange with the lost member would otherwise last until a timeout.
      const bool exchanges = operation.phase == Phase::kRunning && !member.finished;
      if (!exchanges || !informed.insert(member.connection).second) continue;
      v1::LosePeer* lose = batch_.Send(member.connection)->mutable_lose_peer();
      lose->set_generation(ring_.generation());
      lose->set_rank(static_cast<uint32_t>(*ring_.RankOf(lost)));
    }
    if (operation.stream && operation.ends_with_ring()) {
      EndRequest(*operation.stream, failure);
    } else if (!operation.stream && operation.phase == Phase::kRunning) {
      ConcludeRun(operation);  // cancelled before, and perhaps the last member
    }
    if (Operation* const rest = operations_.Find(id)) operations_.EraseIfReleased(*rest);
  }
  std::vector<std::string> reserving, failed;
  for (const auto& [id, operation] : operations_.all()) {
    if (operation.stream && !operation.ends_with_ring()) {
      reserving.push_back(id);
    } else if (Operations::HasFailedRun(operation) || MayBeExplainedByLoss(operation)) {
      failed.push_back(id);
    }
  }
  for (const std::string& id : reserving) {
    Operation& operation = *operations_.Find(id);
    Requeue(operation);
    operations_.Withdraw(operation);
    operations_.EraseIfReleased(operation);
  }
  // Transfers with a member that is not lost have failed.
  for (const std::string& id : failed) {
    if (Operation* const operation = operations_.Find(id)) OnExchangeFailed(*operation);
  }
}

// Returns true if a member has failed in a way that a broken exchange may have caused.
bool Coordinator::Impl::MayBeExplainedByLoss(const Operation& operation) {
  return operation.pending_failure.has_value() && operation.members.size() > 1;
}

// The generation is ending, and the operation used a link that is broken.
void Coordinator::Impl::OnExchangeFailed(Operation& operation) {
  operations_.FinishFailedRuns(operation);
  if (operation.stream) return EndRequest(*operation.stream, loss_failure_);
  ConcludeRun(operation);
}

// Ends the generation once no request runs on, or its time is over.
void Coordinator::Impl::ConcludeEnding() {
  if (!ring_.ending()) return;
  bool runs_on = false, holds_failure = false;
  for (const auto& [id, operation] : operations_.all()) {
    runs_on |= operation.stream.has_value();
    holds_failure |= operation.held_failure.has_value();
  }
  const absl::Duration since_loss = batch_.now() - lost_at_;
  const bool copies_too_long = holds_failure && since_loss > CoordinatorConfig::kStopCopyingTime;
  if (runs_on && !ring_.EndIsDue() && !copies_too_long) return;
  EndGeneration(loss_failure_);
}

void Coordinator::Impl::EndGeneration(const Failure& failure) {
  if (ring_.ending()) {
    batch_.Emit(LossOutlived{ring_.generation(), batch_.now() - ending_since_, completed_ending_,
                             operations_.accepted_requests()});
  }
  std::vector<StreamId> accepted, copied;
  for (auto& [id, operation] : operations_.all()) {
    if (!operation.stream) continue;
    if (!operation.ends_with_ring()) {
      Requeue(operation);
    } else if (operation.may_write_to_client()) {
      copied.push_back(*operation.stream);
    } else {
      accepted.push_back(*operation.stream);
    }
  }
  prepared_places_.Clear();
  for (FailRequest& held : operations_.Clear()) held_failures_.push_back(std::move(held));
  for (const auto& [stream, entry] : queue_.entries()) StopPlanning(*requests_.Find(stream));
  suspicion_.Close();
  for (StreamId stream : accepted) EndRequest(stream, failure);
  // Surviving members may still write; they send TornDown once they have stopped.
  for (StreamId stream : copied) {
    held_failures_.push_back(EndQuietly(*requests_.Find(stream), failure));
  }
  ring_.Lose();
}

}  // namespace ringattn::server
