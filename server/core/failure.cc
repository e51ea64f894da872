// Telling the dead from the slow, and the guilty from their neighbours.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/core/blame.h"
#include "server/core/failures.h"
#include "server/core/impl.h"

namespace ringattn::server {

Failure Coordinator::Impl::LostFailure(ConnectionId connection, const std::string& reason) const {
  return WorkerLost(RankOf(connection).value_or(-1), NameOf(connection), reason,
                    config_.retry_after);
}

void Coordinator::Impl::OnHeartbeat(ConnectionId connection, const v1::Heartbeat& heartbeat) {
  v1::Heartbeat& newest = workers_.at(connection).heartbeat;
  if (heartbeat.sequence() <= newest.sequence()) return;
  newest = heartbeat;
  for (auto& [id, operation] : operations_) {
    for (Member& member : operation.members) {
      if (member.connection != connection) continue;
      const bool named =
          heartbeat.operation_id() == id && heartbeat.generation() == ring_.generation;
      member.waits_for_peer = named && heartbeat.waits_for_peer();
      if (!named) continue;
      member.fraction_done = heartbeat.fraction_done();
      const bool advanced = std::make_pair(heartbeat.step(), heartbeat.progress()) >
                            std::make_pair(member.step, member.progress);
      if (!advanced) continue;
      member.step = heartbeat.step();
      member.progress = heartbeat.progress();
      operation.last_advance = now_;
    }
  }
}

void Coordinator::Impl::OnGenerationFailed(ConnectionId connection,
                                           const v1::GenerationFailed& failed) {
  if (failed.generation() != ring_.generation || !RankOf(connection)) return;
  switch (ring_.phase) {
    case RingPhase::kPreparing:
    case RingPhase::kCommitting:
      ++ring_.failed_formings;
      return TearDown();
    case RingPhase::kReady:
      break;
    case RingPhase::kEmpty:
    case RingPhase::kGathering:
    case RingPhase::kTearingDown:
      return;
  }
  if (!ring_.suspicion) {
    Suspicion& suspicion = ring_.suspicion.emplace();
    suspicion.opened = now_;
    suspicion.closes = now_ + config_.blame_window;
    suspicion.reason =
        absl::StrCat(NameOf(connection), " at step ", failed.step(), ": ", failed.reason());
    for (ConnectionId member : ring_.members) {
      suspicion.heartbeats[member] = workers_.at(member).heartbeat;
    }
  }
  ring_.suspicion->reporters.insert(connection);
  ring_.suspicion->operations.insert(failed.operation_id());
}

void Coordinator::Impl::CheckSilence() {
  std::vector<std::pair<absl::Time, ConnectionId>> silent;
  for (const auto& [connection, worker] : workers_) {
    if (now_ - worker.last_heard > config_.heartbeat_timeout) {
      silent.emplace_back(worker.last_heard, connection);
    }
  }
  std::sort(silent.begin(), silent.end());  // the longest silent takes the blame
  for (const auto& [last_heard, connection] : silent) {
    LoseWorker(connection, absl::StrCat("silent for ", absl::FormatDuration(now_ - last_heard)),
               /*drop=*/true);
  }
}

// A stream that closes within the window has settled the question already.
void Coordinator::Impl::CheckSuspicion() {
  if (!ring_.suspicion || now_ < ring_.suspicion->closes) return;
  const Suspicion& suspicion = *ring_.suspicion;

  const std::vector<const OperationRecord*> roots = RootsOf(suspicion.operations);
  std::vector<Standing> standings;
  for (size_t rank = 0; rank < ring_.members.size(); ++rank) {
    const ConnectionId connection = ring_.members[rank];
    const WorkerRecord& worker = workers_.at(connection);
    const v1::Heartbeat& before = suspicion.heartbeats.at(connection);
    const v1::Heartbeat& after = worker.heartbeat;
    Standing standing;
    standing.rank = rank;
    standing.silence = now_ - worker.last_heard;
    standing.silent = worker.last_heard <= suspicion.opened;
    for (const OperationRecord* operation : roots) {
      for (const Member& member : operation->members) {
        if (member.connection != connection || member.finished) continue;
        standing.owes_progress =
            suspicion.reporters.count(connection) == 0 && !member.waits_for_peer;
        standing.step = member.step;
        standing.progress = member.progress;
      }
    }
    const bool moved = before.operation_id() != after.operation_id() ||
                       before.step() != after.step() || before.progress() != after.progress();
    if (moved) standing.owes_progress = false;
    standings.push_back(standing);
  }

  const std::string first_report = absl::StrCat("first report from ", suspicion.reason);
  const std::optional<int> rank = RankToBlame(standings);
  if (!rank) return EndGeneration(RingEnded(first_report, config_.retry_after));
  EndGeneration(LostFailure(
      ring_.members[*rank],
      absl::StrCat(standings[*rank].silent ? "silent" : "stands still", "; ", first_report)));
}

void Coordinator::Impl::CheckProgress() {
  if (ring_.suspicion) return;
  for (auto& [id, operation] : operations_) {
    if (operation.phase != OperationRecord::Phase::kRunning) continue;
    if (IsBehindAnother(operation)) operation.last_advance = now_;
    if (now_ - operation.last_advance <= operation.progress_timeout) continue;

    std::vector<Standing> standings;
    for (const Member& member : operation.members) {
      if (member.finished) continue;
      Standing standing;
      standing.rank = *RankOf(member.connection);
      standing.owes_progress = !member.waits_for_peer;
      standing.step = member.step;
      standing.progress = member.progress;
      standings.push_back(standing);
    }
    const std::string what =
        absl::StrCat("no progress for ", absl::FormatDuration(now_ - operation.last_advance),
                     " in operation ", id);
    const std::optional<int> rank = RankToBlame(standings);
    if (rank) {
      LoseWorker(ring_.members[*rank], what, /*drop=*/true);
    } else {
      EndGeneration(
          RingEnded(absl::StrCat(what, ": every rank waits for another"), config_.retry_after));
    }
    return;  // either way the generation has ended, and operations_ with it
  }
}

// True while `earlier` still occupies a worker that `later` needs.
bool Coordinator::Impl::Precedes(const OperationRecord& earlier,
                                 const OperationRecord& later) const {
  if (earlier.phase != OperationRecord::Phase::kRunning ||
      earlier.run_sequence >= later.run_sequence) {
    return false;
  }
  for (const Member& theirs : earlier.members) {
    for (const Member& ours : later.members) {
      if (theirs.connection == ours.connection && !theirs.finished) return true;
    }
  }
  return false;
}

bool Coordinator::Impl::IsBehindAnother(const OperationRecord& operation) const {
  for (const auto& [id, other] : operations_) {
    if (Precedes(other, operation)) return true;
  }
  return false;
}

// Where the named operations are held up: they themselves, or those that they wait
// behind. What is computed side by side with them proves nothing.
std::vector<const OperationRecord*> Coordinator::Impl::RootsOf(
    const std::set<std::string>& named) const {
  std::vector<const OperationRecord*> implicated;
  for (const auto& [id, operation] : operations_) {
    if (operation.phase == OperationRecord::Phase::kRunning && named.count(id) > 0) {
      implicated.push_back(&operation);
    }
  }
  for (size_t i = 0; i < implicated.size(); ++i) {  // grows while it is walked
    for (const auto& [id, other] : operations_) {
      const bool known =
          std::find(implicated.begin(), implicated.end(), &other) != implicated.end();
      if (!known && Precedes(other, *implicated[i])) implicated.push_back(&other);
    }
  }
  std::vector<const OperationRecord*> roots;
  for (const OperationRecord* operation : implicated) {
    if (!IsBehindAnother(*operation)) roots.push_back(operation);
  }
  return roots;
}

}  // namespace ringattn::server
