// The ring's life: gather, prepare, commit, serve, tear down.
#include <algorithm>

#include "server/core/failures.h"
#include "server/core/impl.h"

namespace ringattn::server {
namespace {

// A forming that failed is tried again after 2, 4, 8, at most 16 forming delays.
constexpr int kMaxFormingBackoffLog2 = 4;
// Workers that join while others gather put the start off by at most this many
// forming delays.
constexpr int kMaxGatherExtensions = 4;
// Share of the time in which admission may be held back for newcomers: 1 in this.
constexpr int kNewcomerHoldPeriod = 6;

}  // namespace

void Coordinator::Impl::AdvanceRing() {
  switch (ring_.phase) {
    case RingPhase::kEmpty:
      if (!workers_.empty()) Gather();
      return;
    case RingPhase::kGathering: {
      if (workers_.empty()) {
        ring_.phase = RingPhase::kEmpty;
        topology_changed_ = true;
        AnswerReforms(absl::UnavailableError("no worker is connected"));
        return;
      }
      if (now_ < ring_.deadline) return;
      const bool still_joining = now_ - newest_join_ < config_.forming_delay;
      if (still_joining && now_ < ring_.deadline + kMaxGatherExtensions * config_.forming_delay) {
        return;
      }
      return StartPreparing();
    }
    case RingPhase::kPreparing:
      if (now_ >= ring_.deadline) DropAwaited("it did not answer Prepare");
      return;
    case RingPhase::kCommitting:
      if (now_ >= ring_.deadline) DropAwaited("it did not answer Commit");
      return;
    case RingPhase::kReady:
      return ConsiderNewcomers();
    case RingPhase::kTearingDown:
      if (now_ >= ring_.deadline) DropAwaited("it did not answer Teardown");
      if (ring_.awaited.empty()) Gather();
      return;
  }
}

void Coordinator::Impl::Gather() {
  ring_.phase = RingPhase::kGathering;
  ring_.members.clear();
  const int backoff = 1 << std::min(ring_.failed_formings, kMaxFormingBackoffLog2);
  ring_.deadline = now_ + backoff * config_.forming_delay;
  topology_changed_ = true;
}

void Coordinator::Impl::StartPreparing() {
  std::vector<ConnectionId> members;
  for (const auto& [connection, worker] : workers_) members.push_back(connection);
  std::sort(members.begin(), members.end(),
            [this](ConnectionId a, ConnectionId b) { return NameOf(a) < NameOf(b); });
  members.resize(std::min<size_t>(members.size(), config_.limits.max_world_size));

  ++ring_.generation;
  ring_.phase = RingPhase::kPreparing;
  ring_.members = members;
  ring_.blobs.assign(members.size(), "");
  ring_.awaited = {members.begin(), members.end()};
  ring_.deadline = now_ + config_.control_timeout;
  topology_changed_ = true;
  for (size_t rank = 0; rank < members.size(); ++rank) {
    v1::Prepare* prepare = Send(members[rank])->mutable_prepare();
    prepare->set_generation(ring_.generation);
    prepare->set_rank(rank);
    prepare->set_world_size(members.size());
  }
}

void Coordinator::Impl::OnPrepared(ConnectionId connection, const v1::Prepared& prepared) {
  if (ring_.phase != RingPhase::kPreparing || prepared.generation() != ring_.generation) return;
  if (ring_.awaited.erase(connection) == 0) return;
  ring_.blobs[*RankOf(connection)] = prepared.blob();
  if (ring_.awaited.empty()) StartCommitting();
}

void Coordinator::Impl::StartCommitting() {
  ring_.phase = RingPhase::kCommitting;
  ring_.awaited = {ring_.members.begin(), ring_.members.end()};
  ring_.deadline = now_ + config_.control_timeout;
  for (ConnectionId member : ring_.members) {
    v1::Commit* commit = Send(member)->mutable_commit();
    commit->set_generation(ring_.generation);
    for (const std::string& blob : ring_.blobs) commit->add_blobs(blob);
  }
}

void Coordinator::Impl::OnCommitted(ConnectionId connection, const v1::Committed& committed) {
  if (ring_.phase != RingPhase::kCommitting || committed.generation() != ring_.generation) return;
  if (ring_.awaited.erase(connection) == 0) return;
  workers_.at(connection).committed = committed;
  if (ring_.awaited.empty()) BecomeReady();
}

void Coordinator::Impl::BecomeReady() {
  ring_.phase = RingPhase::kReady;
  ring_.deadline = absl::InfiniteFuture();
  ring_.failed_formings = 0;
  ++formed_count_;
  topology_changed_ = true;
  AnswerReforms(absl::OkStatus());
}

void Coordinator::Impl::EndGeneration(const Failure& failure) {
  std::vector<StreamId> accepted;
  for (auto& [id, operation] : operations_) {
    if (!operation.stream) continue;
    if (operation.was_accepted) {
      accepted.push_back(*operation.stream);
    } else {
      Requeue(operation);
    }
  }
  operations_.clear();  // the workers free them on Teardown
  ++releases_;
  // Lost again before the first replacement came: what was whole is still missed.
  if (!ReplacementIsDue(ring_size_before_loss_)) ring_size_before_loss_ = ring_.members.size();
  ring_lost_at_ = now_;
  for (StreamId stream : accepted) EndRequest(stream, failure);
  TearDown();
}

void Coordinator::Impl::TearDown() {
  if (ring_.phase == RingPhase::kReady) ringless_since_ = now_;
  ring_.phase = RingPhase::kTearingDown;
  ring_.suspicion.reset();
  ring_.awaited.clear();
  ring_.deadline = now_ + config_.teardown_timeout;
  newcomer_hold_since_.reset();
  topology_changed_ = true;
  for (ConnectionId member : ring_.members) {
    if (!Connected(member)) continue;
    ring_.awaited.insert(member);
    Send(member)->mutable_teardown()->set_generation(ring_.generation);
  }
}

void Coordinator::Impl::OnTornDown(ConnectionId connection, const v1::TornDown& torn_down) {
  if (ring_.phase != RingPhase::kTearingDown || torn_down.generation() != ring_.generation) return;
  ring_.awaited.erase(connection);
}

void Coordinator::Impl::DropAwaited(const char* what) {
  const std::set<ConnectionId> awaited = ring_.awaited;
  for (ConnectionId connection : awaited) LoseWorker(connection, what, /*drop=*/true);
}

bool Coordinator::Impl::NewcomersWait() const {
  return workers_.size() > ring_.members.size() &&
         ring_.members.size() < static_cast<size_t>(config_.limits.max_world_size);
}

bool Coordinator::Impl::HoldsForNewcomers() const {
  return newcomer_hold_since_ && now_ >= *newcomer_hold_since_;
}

void Coordinator::Impl::ConsiderNewcomers() {
  if (!NewcomersWait()) {
    newcomer_hold_since_.reset();
    return;
  }
  if (ring_.suspicion || now_ - newest_join_ < config_.forming_delay) return;
  if (operations_.empty()) return TearDown();
  if (!newcomer_hold_since_) newcomer_hold_since_ = now_;
  if (now_ >= *newcomer_hold_since_ + config_.newcomer_hold_max) {
    newcomer_hold_since_ = now_ + (kNewcomerHoldPeriod - 1) * config_.newcomer_hold_max;
  }
}

void Coordinator::Impl::On(const ReformRequested&) {
  reform_asked_ = true;
  if (workers_.empty()) {
    AnswerReforms(absl::UnavailableError("no worker is connected"));
  } else if (ring_.phase == RingPhase::kReady) {
    EndGeneration(RingEnded("an operator asked for a new one", config_.retry_after));
  }
}

void Coordinator::Impl::AnswerReforms(const absl::Status& status) {
  if (std::exchange(reform_asked_, false)) Emit(RingReformed{status, ring_.generation});
}

}  // namespace ringattn::server
