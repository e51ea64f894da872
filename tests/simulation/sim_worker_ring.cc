// SimWorker: how a ring forms, is probed and ends.
#include <algorithm>

#include "common/wire/durations.h"
#include "tests/simulation/sim_worker.h"

namespace ringattn::server::simulation {
namespace {

constexpr absl::Duration kConnectTimeout = absl::Seconds(5);

}  // namespace

void SimWorker::OnPrepare(const v1::Prepare& prepare) {
  if (generation_ != 0) {
    world_->Violate(name_, ": Prepare ", prepare.generation(), " while ", generation_, " lives");
  }
  generation_ = prepare.generation();
  committed_ = broken_ = false;
  v1::JoinRequest answer;
  answer.mutable_prepared()->set_generation(generation_);
  answer.mutable_prepared()->set_blob(blob());
  Later(world_->random.Between(absl::ZeroDuration(), absl::Milliseconds(100)),
        [this, answer] { Say(answer); });
}

void SimWorker::OnCommit(const v1::Commit& commit) {
  if (commit.generation() != generation_) {
    return world_->Violate(name_, ": Commit of ", commit.generation(), " in ", generation_);
  }
  blobs_ = {commit.blobs().begin(), commit.blobs().end()};
  if (std::count(blobs_.begin(), blobs_.end(), blob()) != 1) {
    world_->Violate(name_, ": Commit without its own blob");
  }
  absl::Duration delay = world_->random.Between(absl::ZeroDuration(), absl::Milliseconds(200));
  bool connected = true;
  for (const std::string& peer : blobs_) {
    const SimWorker* worker = find_peer_(peer);
    if (worker == nullptr) connected = false;
    if (worker != nullptr && worker->stopped()) {
      connected = false;
      delay = kConnectTimeout;
    }
  }
  std::vector<uint32_t> unreached;
  for (int rank = 0; rank < commit.probe_addresses_size(); ++rank) {
    if (world_->network.Reaches(name_, commit.probe_addresses(rank))) continue;
    unreached.push_back(static_cast<uint32_t>(rank));
    connected = false;
    delay = kConnectTimeout;
  }
  Later(delay, [this, connected, unreached, generation = generation_] {
    if (generation != generation_) return;
    if (!connected) return BreakRing("connect failed", unreached);
    committed_ = true;
    v1::JoinRequest answer;
    answer.mutable_committed()->set_generation(generation_);
    Say(answer);
  });
}

void SimWorker::OnProbe(const v1::Probe& probe) {
  v1::JoinRequest answer;
  answer.mutable_probed()->set_id(probe.id());
  absl::Duration delay = world_->random.Between(absl::ZeroDuration(), absl::Milliseconds(20));
  for (int i = 0; i < probe.addresses_size(); ++i) {
    if (world_->network.Reaches(name_, probe.addresses(i))) continue;
    answer.mutable_probed()->add_unreached(static_cast<uint32_t>(i));
    delay = ToDuration(probe.timeout());
  }
  Later(delay, [this, answer] {
    if (connection_ != 0) Say(answer);
  });
}

void SimWorker::OnTeardown(const v1::Teardown& teardown) {
  if (teardown.generation() < generation_) return;
  if (stuck_) {
    if (world_->random.OneIn(2)) return;  // what is stuck may not come loose
    stuck_ = false;
  }
  FreeEverything();
  v1::JoinRequest answer;
  answer.mutable_torn_down()->set_generation(teardown.generation());
  Later(world_->random.Between(absl::ZeroDuration(), absl::Milliseconds(500)),
        [this, answer] { Say(answer); });
}

void SimWorker::OnLosePeer(const v1::LosePeer& lose) {
  if (lose.generation() != generation_ || !committed_) return;
  if (lose.rank() >= blobs_.size()) {
    if (!broken_) world_->Violate(name_, ": LosePeer of rank ", lose.rank());
    return;
  }
  const std::string peer = blobs_[lose.rank()];
  if (traits_.isolates_peers) return OnPeerBroke(generation_, peer);
  BreakRing("lost " + peer);
}

}  // namespace ringattn::server::simulation
