#include "server/core/loss/suspicion.h"

#include "absl/strings/str_cat.h"

namespace ringattn::server {

void Suspicion::Report(ConnectionId reporter, const v1::GenerationFailed& failed, const Ring& ring,
                       const Roster& roster, absl::Time now, absl::Duration window) {
  if (!open_) {
    open_.emplace();
    open_->opened = now;
    open_->closes = now + window;
    open_->first_report =
        absl::StrCat(roster.NameOf(reporter), " at step ", failed.step(), ": ", failed.reason());
    for (ConnectionId member : ring.members()) {
      open_->heartbeats[member] = roster.at(member).heartbeat;
    }
  }
  open_->reporters.insert(reporter);
  open_->operations.insert(failed.operation_id());
}

void Suspicion::Forgive(absl::Duration pause) {
  if (!open_) return;
  open_->opened += pause;
  open_->closes += pause;
}

std::vector<RankState> Suspicion::Evidence(const Ring& ring, const Roster& roster,
                                           const Operations& operations, absl::Time now) const {
  const std::vector<const Operation*> roots = operations.RootsOf(open_->operations);
  std::vector<RankState> ranks;
  for (size_t rank = 0; rank < ring.members().size(); ++rank) {
    const ConnectionId connection = ring.members()[rank];
    const Worker& worker = roster.at(connection);
    const v1::Heartbeat& before = open_->heartbeats.at(connection);
    const v1::Heartbeat& after = worker.heartbeat;
    RankState state;
    state.rank = rank;
    state.silence = now - worker.last_heard;
    state.silent = worker.last_heard <= open_->opened;
    for (const Operation* operation : roots) {
      for (const Operation::Member& member : operation->members) {
        if (member.connection != connection || member.finished) continue;
        state.owes_progress = open_->reporters.count(connection) == 0 && !member.waits_for_peer;
        state.step = member.step;
        state.progress = member.progress;
      }
    }
    const bool moved = before.operation_id() != after.operation_id() ||
                       before.step() != after.step() || before.progress() != after.progress();
    if (moved) state.owes_progress = false;
    ranks.push_back(state);
  }
  return ranks;
}

std::vector<RankState> RankStatesOf(const Operation& operation, const Ring& ring) {
  std::vector<RankState> ranks;
  for (const Operation::Member& member : operation.members) {
    if (member.finished) continue;
    RankState state;
    state.rank = *ring.RankOf(member.connection);
    state.owes_progress = !member.waits_for_peer;
    state.step = member.step;
    state.progress = member.progress;
    ranks.push_back(state);
  }
  return ranks;
}

}  // namespace ringattn::server
