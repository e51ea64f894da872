// A worker's ring pass: steps, blocks that travel, and how a ring breaks.
#include <algorithm>

#include "tests/simulation/sim_worker.h"

namespace ringattn::server::simulation {
namespace {

constexpr int kTilesPerStep = 3;
// One device alone may compute for longer than any transfer may take.
constexpr uint64_t kHeavyTokens = 1800;
constexpr int kHeavyFactor = 40;

}  // namespace

std::string SimWorker::BlobOf(const Operation& operation, int ring_rank) const {
  const int world_size = operation.world_size();
  const size_t rank = operation.reserve.members((ring_rank + world_size) % world_size);
  return rank < blobs_.size() ? blobs_[rank] : "";
}

SimWorker* SimWorker::Peer(const Operation& operation, int ring_rank) const {
  const std::string blob = BlobOf(operation, ring_rank);
  return blob.empty() ? nullptr : find_peer_(blob);
}

bool SimWorker::IsBroken(const Operation& operation, int ring_rank) const {
  return broken_peers_.count(BlobOf(operation, ring_rank)) > 0;
}

void SimWorker::StartNext() {
  if (!running_.empty() || runs_.empty()) return;
  running_ = runs_.front();
  runs_.pop_front();
  const Operation& operation = operations_.at(running_);
  if (operation.world_size() > 1 && !traits_.isolates_peers) {
    if (broken_) return FailExchange(running_, "the ring is broken");
    for (int i = 0; i < operation.world_size(); ++i) {
      if (IsBroken(operation, i)) return BreakRing("a peer was gone before the first step");
    }
  }
  Begin(running_);
}

void SimWorker::Begin(const std::string& id) {
  world_->Trace(name_, " runs ", id, id == preempting_ ? " preempting" : "");
  if (std::exchange(stick_next_, false)) {
    world_->Trace(name_, " sticks in ", id);
    stuck_ = true;
    faulty_processes_.insert(process_);
  }
  BeginStep(id);
}

void SimWorker::StartPreempting() {
  if (!preempting_.empty() || preempting_runs_.empty()) return;
  if (!running_.empty() && world_->now() < next_preemption_) {
    return Later(next_preemption_ - world_->now(), [this] { StartPreempting(); });
  }
  preempting_ = preempting_runs_.front();
  preempting_runs_.pop_front();
  preemption_since_ = world_->now();
  world_->preemptions += !running_.empty();
  Later(kLongestPause, [this] { EndPause(); });
  Begin(preempting_);
}

void SimWorker::EndPreemption() {
  const absl::Duration pause = std::min(world_->now() - preemption_since_, kLongestPause);
  const absl::Duration after = operations_.at(preempting_).preempt_after;
  next_preemption_ = world_->now() + std::max(after, pause);
  preempting_.clear();
  EndPause();
  StartPreempting();
}

void SimWorker::EndPause() {
  if (!Pauses() && std::exchange(paused_, false)) ComputeTile(running_);
}

bool SimWorker::Pauses() const {
  return !preempting_.empty() && world_->now() < preemption_since_ + kLongestPause;
}

// REQUIRES: the block of this step is here.
void SimWorker::BeginStep(const std::string& id) {
  Operation& operation = operations_.at(id);
  operation.waits = false;
  operation.tile = 0;
  if (stuck_ && operation.step == world_->random.Below(operation.world_size())) return;
  if (stuck_ && operation.step + 1 == operation.world_size()) return;
  ComputeTile(id);
}

void SimWorker::ComputeTile(const std::string& id) {
  if (id == running_ && Pauses()) {
    paused_ = true;
    return;
  }
  const Operation& operation = operations_.at(id);
  absl::Duration time = world_->random.Between(0.5 * traits_.tile_time, traits_.tile_time);
  const bool alone = operation.world_size() == 1;
  if (alone && operation.reserve.shape().seq_len_q() > kHeavyTokens) {
    time = std::min(kHeavyFactor * time, absl::Seconds(5));
  }
  if (operation.cancelled || operation.exchange_failed) time = absl::Microseconds(10);
  Later(time, [this, id] {
    const auto found = operations_.find(id);
    if (found == operations_.end() || !IsRunning(id)) return;
    ++found->second.progress;
    if (++found->second.tile < kTilesPerStep) return ComputeTile(id);
    EndStep(id);
  });
}

void SimWorker::EndStep(const std::string& id) {
  Operation& operation = operations_.at(id);
  const int next = ++operation.step;
  if (next == operation.world_size()) {
    if (operation.exchange_failed) return FailExchange(id, "connection reset");
    const bool fails = std::exchange(fail_next_, false);
    return Finish(id, !fails);
  }
  // Travels although this rank may be cancelled: the neighbour waits for it.
  SimWorker* right = Peer(operation, operation.ring_rank + 1);
  if (IsBroken(operation, operation.ring_rank + 1)) {
    operation.exchange_failed = true;
  } else if (right != nullptr && world_->network.Carries(name_, right->name_)) {
    absl::Duration delay = world_->random.Between(absl::Microseconds(50), absl::Milliseconds(5));
    const absl::Duration slowness = world_->network.slowness;
    if (slowness > absl::ZeroDuration() && !world_->network.SameHost(name_, right->name_)) {
      delay += world_->random.Between(slowness / 4, slowness);
    }
    world_->scheduler.After(delay, [right, id, next, process = right->process_] {
      if (process != right->process_) return;
      right->Later(absl::ZeroDuration(), [right, id, next] { right->OnBlock(id, next); });
    });
  }
  if (operation.received.count(next) > 0) return BeginStep(id);
  if (IsBroken(operation, operation.ring_rank - 1)) {
    // Completes the other transfers, because those peers wait for them.
    operation.exchange_failed = true;
    return BeginStep(id);
  }
  operation.waits = true;
  if (traits_.transfer_timeout == absl::InfiniteDuration()) return;
  Later(traits_.transfer_timeout, [this, id, next] {
    const auto found = operations_.find(id);
    if (found == operations_.end() || running_ != id) return;
    if (!found->second.waits || found->second.step != next) return;
    if (!traits_.isolates_peers) return BreakRing("transfer timed out");
    BreakLink(BlobOf(found->second, found->second.ring_rank - 1));
  });
}

void SimWorker::OnBlock(const std::string& id, int step) {
  const auto found = operations_.find(id);
  if (found == operations_.end()) return;
  Operation& operation = found->second;
  if (broken_ || IsBroken(operation, operation.ring_rank - 1)) return;
  operation.received.insert(step);
  ++operation.progress;
  if (running_ == id && operation.waits && operation.step == step) BeginStep(id);
}

void SimWorker::Finish(const std::string& id, bool ok) {
  Operation& operation = operations_.at(id);
  operation.finished = true;
  operation.ended_well = ok && !operation.cancelled;
  const bool is_inline = operation.inline_reserved.has_value();
  if (ok && !operation.cancelled && !is_inline && std::exchange(stop_sending_next_, false)) {
    world_->Trace(name_, " does not send ", id);
    operation.sends = false;
    faulty_processes_.insert(process_);
  }
  v1::JoinRequest message;
  v1::Finished* finished = message.mutable_finished();
  finished->set_operation_id(id);
  finished->set_generation(generation_);
  finished->set_ok(ok && !operation.cancelled);
  finished->set_cancelled(operation.cancelled);
  if (!ok) finished->set_reason("injected failure");
  if (is_inline) {
    const bool in_memory = !operation.reserve.places().empty();
    *finished->mutable_reserved() = *operation.inline_reserved;
    if (in_memory && finished->ok() && world_->random.OneIn(30)) {
      world_->Trace(name_, " has lost the region of ", id);
      v1::JoinRequest lost;
      lost.mutable_transfer_progress()->set_operation_id(id);
      lost.mutable_transfer_progress()->set_generation(generation_);
      lost.mutable_transfer_progress()->set_region_released(true);
      Say(lost);
      finished->set_ok(false);
    }
    if (finished->ok() && !in_memory) finished->add_outputs()->set_data(id);
  }
  Say(message);
  if (id == preempting_) {
    EndPreemption();
  } else {
    running_.clear();
    StartNext();
  }
  if (!is_inline) return;
  Keep(operation);
  operations_.erase(id);
}

void SimWorker::StopRun(const std::string& id) {
  runs_.erase(std::remove(runs_.begin(), runs_.end(), id), runs_.end());
  preempting_runs_.erase(std::remove(preempting_runs_.begin(), preempting_runs_.end(), id),
                         preempting_runs_.end());
  if (id == preempting_) return EndPreemption();
  if (id != running_) return;
  running_.clear();
  paused_ = false;
  StartNext();
}

void SimWorker::FailExchange(const std::string& id, const std::string& reason) {
  operations_.at(id).finished = true;
  world_->Trace(name_, " reports that ", id, " failed: ", reason);
  v1::JoinRequest message;
  v1::GenerationFailed* failed = message.mutable_generation_failed();
  failed->set_generation(generation_);
  failed->set_operation_id(id);
  failed->set_reason(reason);
  Say(message);
  running_.clear();
  paused_ = false;
  StartNext();
}

// This worker's transfers have failed: its own links close too, which is what its
// neighbours then see. Runs without peers go on.
void SimWorker::BreakRing(const std::string& reason, const std::vector<uint32_t>& unreached) {
  if (std::exchange(broken_, true)) return;
  world_->Trace(name_, " reports generation ", generation_, " failed: ", reason);
  LeaveRing();
  if (!committed_) {
    v1::JoinRequest message;
    v1::GenerationFailed* failed = message.mutable_generation_failed();
    failed->set_generation(generation_);
    failed->set_reason(reason);
    failed->mutable_unreached()->Assign(unreached.begin(), unreached.end());
    return Say(message);
  }
  const auto found = operations_.find(running_);
  if (found == operations_.end() || found->second.world_size() == 1) return;
  if (world_->random.OneIn(2)) {
    v1::JoinRequest message;
    message.mutable_finished()->set_operation_id(running_);
    message.mutable_finished()->set_generation(generation_);
    message.mutable_finished()->set_reason(reason);
    Say(message);
  }
  FailExchange(running_, reason);
}

void SimWorker::LeaveRing() {
  for (const std::string& blob : std::exchange(blobs_, {})) Notify(blob);
}

void SimWorker::Notify(const std::string& blob) {
  SimWorker* peer = find_peer_(blob);
  if (peer == nullptr || peer == this || !world_->network.Carries(name_, peer->name_)) return;
  world_->scheduler.After(
      world_->random.Between(absl::ZeroDuration(), absl::Milliseconds(50)),
      [peer, generation = generation_, mine = this->blob(), process = peer->process_] {
        if (process != peer->process_) return;
        peer->Later(absl::ZeroDuration(),
                    [peer, generation, mine] { peer->OnPeerBroke(generation, mine); });
      });
}

void SimWorker::BreakLink(const std::string& peer) {
  world_->Trace(name_, " gives up ", peer);
  Notify(peer);
  OnPeerBroke(generation_, peer);
}

// Noticed only where a transfer of the operation that runs touches that peer.
void SimWorker::OnPeerBroke(uint64_t generation, const std::string& peer) {
  if (generation != generation_ || broken_) return;
  broken_peers_.insert(peer);
  const auto found = operations_.find(running_);
  if (found == operations_.end() || stuck_) return;
  Operation& operation = found->second;
  if (traits_.isolates_peers) {
    if (!operation.waits || BlobOf(operation, operation.ring_rank - 1) != peer) return;
    operation.exchange_failed = true;
    return BeginStep(running_);
  }
  for (int i = 0; i < operation.world_size(); ++i) {
    if (BlobOf(operation, i) == peer) return BreakRing("connection reset by " + peer);
  }
}

}  // namespace ringattn::server::simulation
