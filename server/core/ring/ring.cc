#include "server/core/ring/ring.h"

#include <algorithm>

#include "common/wire/durations.h"
#include "server/core/ring/rank_order.h"

namespace ringattn::server {
namespace {

// A failed forming is retried after 2, 4, 8, at most 16 forming delays.
constexpr int kMaxFormingBackoffLog2 = 4;
// Workers that join while others gather delay the start by at most this many forming delays.
constexpr int kMaxGatherExtensions = 4;
// Admission is held back for newcomers during at most one in this many hold times.
constexpr int kNewcomerHoldPeriod = 6;

}  // namespace

Ring::Ring(const CoordinatorConfig* config, const Roster* roster, ActionBatch* batch)
    : config_(*config),
      roster_(*roster),
      batch_(*batch),
      reach_(config, roster, batch),
      generation_(config->initial_generation) {}

std::optional<int> Ring::RankOf(ConnectionId connection) const {
  const auto found = std::find(members_.begin(), members_.end(), connection);
  if (found == members_.end()) return std::nullopt;
  return static_cast<int>(found - members_.begin());
}

void Ring::Enter(RingPhase phase, absl::Time deadline) {
  phase_ = phase;
  deadline_ = deadline;
  changed_ = true;
}

// ------------------------------------------------------------------------ time

std::vector<ConnectionId> Ring::Overdue(const char** what) const {
  switch (phase_) {
    case RingPhase::kPreparing:
      *what = "it did not answer Prepare";
      break;
    case RingPhase::kCommitting:
      *what = "it did not answer Commit";
      break;
    case RingPhase::kTearingDown:
      *what = "it did not answer Teardown";
      break;
    case RingPhase::kEmpty:
    case RingPhase::kGathering:
    case RingPhase::kReady:
    case RingPhase::kEnding:
      return {};
  }
  if (batch_.now() < deadline_) return {};
  return {awaited_.begin(), awaited_.end()};
}

void Ring::Advance(bool idle, bool steady) {
  switch (phase_) {
    case RingPhase::kEmpty:
      if (!roster_.Staying().empty()) Gather();
      return;
    case RingPhase::kGathering:
      if (roster_.Staying().empty()) {
        Enter(RingPhase::kEmpty, absl::InfiniteFuture());
        return AnswerReform(absl::UnavailableError("no worker is connected"));
      }
      if (MayPrepare()) StartPreparing();
      return;
    case RingPhase::kPreparing:
    case RingPhase::kCommitting:
    case RingPhase::kEnding:
      return;
    case RingPhase::kReady:
      if (!MemberLeaves()) return ConsiderNewcomers(idle, steady);
      if (!idle || !steady) return;
      // A replacement is expected soon.
      RememberSize();
      return TearDown();
    case RingPhase::kTearingDown:
      if (awaited_.empty()) Gather();
      return;
  }
}

void Ring::Forgive(absl::Duration pause) {
  reach_.Forgive(pause);
  deadline_ += pause;
  lost_at_ += pause;
  ringless_since_ += pause;
}

// --------------------------------------------------------------------- forming

void Ring::Gather() {
  ExplainFailure();
  members_.clear();
  const int backoff = 1 << std::min(failed_formings_, kMaxFormingBackoffLog2);
  Enter(RingPhase::kGathering, batch_.now() + backoff * config_.forming_delay);
}

bool Ring::MayPrepare() const {
  const absl::Time now = batch_.now();
  if (now < deadline_) return false;
  const bool still_joining = now - roster_.newest_join() < config_.forming_delay;
  return !still_joining || now >= deadline_ + kMaxGatherExtensions * config_.forming_delay;
}

void Ring::StartPreparing() {
  std::vector<ConnectionId> members = reach_.LargestReachable(roster_.Staying());
  SortForRanks(roster_, &members);
  members.resize(std::min<size_t>(members.size(), config_.limits.max_world_size));

  ++generation_;
  members_ = members;
  blobs_.assign(members.size(), "");
  awaited_ = {members.begin(), members.end()};
  Enter(RingPhase::kPreparing, batch_.now() + config_.control_timeout);
  for (size_t rank = 0; rank < members.size(); ++rank) {
    v1::Prepare* prepare = batch_.Send(members[rank])->mutable_prepare();
    prepare->set_generation(generation_);
    prepare->set_rank(rank);
    prepare->set_world_size(members.size());
  }
}

void Ring::OnPrepared(ConnectionId connection, const v1::Prepared& prepared) {
  if (phase_ != RingPhase::kPreparing || prepared.generation() != generation_) return;
  if (awaited_.erase(connection) == 0) return;
  blobs_[*RankOf(connection)] = prepared.blob();
  if (awaited_.empty()) StartCommitting();
}

void Ring::StartCommitting() {
  phase_ = RingPhase::kCommitting;
  awaited_ = {members_.begin(), members_.end()};
  deadline_ = batch_.now() + config_.control_timeout;
  std::vector<int> hosts = HostsOf(members_, roster_);
  if (hosts == std::vector<int>(hosts.size(), hosts.front())) hosts.clear();
  for (ConnectionId member : members_) {
    v1::Commit* commit = batch_.Send(member)->mutable_commit();
    commit->set_generation(generation_);
    for (const std::string& blob : blobs_) commit->add_blobs(blob);
    for (int host : hosts) commit->add_hosts(static_cast<uint32_t>(host));
    for (ConnectionId other : members_) {
      commit->add_probe_addresses(roster_.at(other).registration.probe_address());
    }
    SetDuration(config_.control_timeout, commit->mutable_timeout());
  }
}

bool Ring::OnCommitted(ConnectionId connection, const v1::Committed& committed) {
  if (phase_ != RingPhase::kCommitting || committed.generation() != generation_) return false;
  if (awaited_.erase(connection) == 0) return false;
  if (awaited_.empty()) BecomeReady();
  return true;
}

void Ring::BecomeReady() {
  Enter(RingPhase::kReady, absl::InfiniteFuture());
  failed_formings_ = 0;
  ++formed_count_;
  reach_.OnFormed(members_);
  AnswerReform(absl::OkStatus());
}

// ------------------------------------------------------------------ tearing down

void Ring::OnMemberFailed(ConnectionId connection) {
  awaited_.erase(connection);
  if (phase_ != RingPhase::kPreparing && phase_ != RingPhase::kCommitting) return;
  ++failed_formings_;
  TearDown();
}

void Ring::OnFormingFailed(ConnectionId connection, const v1::GenerationFailed& failed) {
  if (failed.generation() != generation_ || !RankOf(connection)) return;
  const bool forming = phase_ == RingPhase::kPreparing || phase_ == RingPhase::kCommitting;
  if (!forming && !failure_reported_) return;
  failure_reported_ = true;
  std::vector<ConnectionId> unreached;
  for (uint32_t rank : failed.unreached()) {
    if (rank < members_.size()) unreached.push_back(members_[rank]);
  }
  failure_explained_ |= !unreached.empty();
  reach_.OnUnreached(connection, unreached, failed.reason());
  if (forming) OnMemberFailed(connection);
}

// Late reports have arrived by now.
void Ring::ExplainFailure() {
  if (failure_reported_ && !failure_explained_) reach_.OnUnexplained(members_);
  failure_reported_ = failure_explained_ = false;
}

void Ring::BeginEnding() {
  RememberSize();
  ringless_since_ = batch_.now();
  newcomer_hold_since_.reset();
  Enter(RingPhase::kEnding, batch_.now() + config_.loss_drain_timeout);
}

void Ring::Lose() {
  if (!ending()) RememberSize();
  TearDown();
}

void Ring::RememberSize() {
  // A second loss before the first replacement keeps the original size.
  if (!ReplacementIsDue(size_before_loss_)) size_before_loss_ = members_.size();
  lost_at_ = batch_.now();
}

void Ring::TearDown() {
  if (phase_ == RingPhase::kReady) ringless_since_ = batch_.now();
  Enter(RingPhase::kTearingDown, batch_.now() + config_.teardown_timeout);
  awaited_.clear();
  newcomer_hold_since_.reset();
  for (ConnectionId member : members_) {
    if (!roster_.Has(member)) continue;
    awaited_.insert(member);
    batch_.Send(member)->mutable_teardown()->set_generation(generation_);
  }
}

void Ring::OnTornDown(ConnectionId connection, const v1::TornDown& torn_down) {
  if (phase_ != RingPhase::kTearingDown || torn_down.generation() != generation_) return;
  awaited_.erase(connection);
}

bool Ring::ReplacementIsDue(int world_size) const {
  if (world_size <= static_cast<int>(members_.size())) return false;
  const bool was_larger =
      world_size <= size_before_loss_ && batch_.now() - lost_at_ < config_.replacement_time_max;
  return was_larger || batch_.now() - batch_.started_at() < config_.assembly_time_max;
}

// ------------------------------------------- leaving members, newcomers, operators

bool Ring::MemberLeaves() const {
  const std::vector<ConnectionId> leaving = roster_.Leaving();
  return ready() && std::any_of(leaving.begin(), leaving.end(),
                                [this](ConnectionId one) { return RankOf(one).has_value(); });
}

bool Ring::NewcomersWait() const {
  if (members_.size() >= static_cast<size_t>(config_.limits.max_world_size)) return false;
  const std::vector<ConnectionId> staying = roster_.Staying();
  return staying.size() > members_.size() &&
         reach_.LargestReachable(staying).size() > members_.size();
}

bool Ring::IsParted(ConnectionId connection) const {
  if (!reach_.has_cuts() || (ready() && RankOf(connection))) return false;
  const std::vector<ConnectionId> staying = roster_.Staying();
  const std::vector<ConnectionId> largest = reach_.LargestReachable(staying);
  const auto has = [connection](const std::vector<ConnectionId>& workers) {
    return std::find(workers.begin(), workers.end(), connection) != workers.end();
  };
  return has(staying) && !has(largest);
}

bool Ring::HoldsAdmission() const {
  return MemberLeaves() || (newcomer_hold_since_ && batch_.now() >= *newcomer_hold_since_);
}

void Ring::ConsiderNewcomers(bool idle, bool steady) {
  if (!NewcomersWait()) {
    newcomer_hold_since_.reset();
    return;
  }
  const absl::Time now = batch_.now();
  if (!steady || now - roster_.newest_join() < config_.forming_delay) return;
  if (idle) return TearDown();
  if (!newcomer_hold_since_) newcomer_hold_since_ = now;
  if (now >= *newcomer_hold_since_ + config_.newcomer_hold_max) {
    newcomer_hold_since_ = now + (kNewcomerHoldPeriod - 1) * config_.newcomer_hold_max;
  }
}

void Ring::AskReform() {
  reform_asked_ = true;
  if (roster_.empty()) AnswerReform(absl::UnavailableError("no worker is connected"));
}

void Ring::AnswerReform(const absl::Status& status) {
  if (std::exchange(reform_asked_, false)) batch_.Emit(RingReformed{status, generation_});
}

}  // namespace ringattn::server
