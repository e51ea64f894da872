// The one order of runs.
#include <algorithm>

#include "server/core/failures.h"
#include "server/core/impl.h"

namespace ringattn::server {
namespace {

using Phase = OperationRecord::Phase;

bool HaveSameMembers(const OperationRecord& a, const OperationRecord& b) {
  return std::equal(a.members.begin(), a.members.end(), b.members.begin(), b.members.end(),
                    [](const auto& x, const auto& y) { return x.connection == y.connection; });
}

bool ShareMembers(const OperationRecord& a, const OperationRecord& b) {
  for (const auto& x : a.members) {
    for (const auto& y : b.members) {
      if (x.connection == y.connection) return true;
    }
  }
  return false;
}

}  // namespace

// In the order in which uploads were complete; an operation that has to wait holds
// up those behind it that need its members.
void Coordinator::Impl::StartDueRuns() {
  if (ring_.suspicion) return;
  std::vector<OperationRecord*> waiting;
  for (auto& [id, operation] : operations_) {
    if (operation.phase == Phase::kUploaded) waiting.push_back(&operation);
  }
  std::sort(waiting.begin(), waiting.end(),
            [](const auto* a, const auto* b) { return a->run_sequence < b->run_sequence; });
  for (OperationRecord* operation : waiting) {
    if (MayRun(*operation)) StartRun(*operation);
  }
}

// Workers run what they are given one after another, so an operation may be sent
// ahead, but not where its transfers would have to wait for what only some of its
// members compute: that can take longer than any bound on a transfer.
bool Coordinator::Impl::MayRun(const OperationRecord& operation) const {
  for (const auto& [id, other] : operations_) {
    if (other.run_sequence >= operation.run_sequence) continue;
    if (other.phase == Phase::kUploaded && ShareMembers(other, operation)) return false;
    const bool has_transfers = operation.members.size() > 1;
    if (has_transfers && !HaveSameMembers(other, operation) && Precedes(other, operation)) {
      return false;
    }
  }
  return true;
}

// Sent to all members at once, so that any two operations run in the same order on
// all workers that they share.
void Coordinator::Impl::StartRun(OperationRecord& operation) {
  Enter(operation, Phase::kRunning);
  for (const Member& member : operation.members) {
    v1::Run* run = Send(member.connection)->mutable_run();
    run->set_operation_id(operation.id);
    run->set_generation(ring_.generation);
  }
  RequestRecord& request = requests_.at(*operation.stream);
  request.run_at = now_;
  SetState(request, v1::OPERATION_STATE_COMPUTING);
}

void Coordinator::Impl::OnFinished(ConnectionId connection, const v1::Finished& finished) {
  const MemberRef ref = FindMember(connection, finished.operation_id(), finished.generation());
  if (ref.operation == nullptr || ref.operation->phase != Phase::kRunning) return;
  OperationRecord& operation = *ref.operation;
  Member& member = *ref.member;
  if (member.finished) return;
  member.finished = true;
  operation.last_advance = now_;
  member.report = finished.report();
  member.report.set_rank(ref.ring_rank);
  member.report.set_worker(NameOf(connection));
  if (!finished.ok() && operation.stream && !operation.pending_failure) {
    operation.pending_failure =
        ComputeFailed(*RankOf(connection), NameOf(connection), finished.reason());
    // Alone it has no peer whose loss could be the cause.
    const bool alone = operation.members.size() == 1;
    operation.pending_failure_due = now_ + (alone ? absl::ZeroDuration() : config_.blame_window);
  }
  FinishRunIfDone(operation);
}

void Coordinator::Impl::FinishRunIfDone(OperationRecord& operation) {
  for (const Member& member : operation.members) {
    if (!member.finished) return;
  }
  if (!operation.stream) return ReleaseAll(operation);
  if (operation.pending_failure) {
    if (operation.pending_failure_due <= now_) FailPending(operation);
    return;
  }
  Enter(operation, Phase::kDownloading);
  RequestRecord& request = requests_.at(*operation.stream);
  request.download_at = now_;
  BeginDownload begin;
  begin.stream = request.arrived.stream;
  for (const Member& member : operation.members) begin.reports.push_back(member.report);
  begin.queue_time = request.accepted_at - request.arrived_at;
  begin.upload_time = request.run_at - request.accepted_at;
  begin.compute_time = now_ - request.run_at;
  Emit(std::move(begin));
  SetState(request, v1::OPERATION_STATE_DOWNLOADING);
}

void Coordinator::Impl::FailPending(OperationRecord& operation) {
  const Failure failure = *operation.pending_failure;
  EndRequest(*operation.stream, failure);
}

}  // namespace ringattn::server
