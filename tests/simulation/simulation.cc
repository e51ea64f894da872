#include "tests/simulation/simulation.h"

#include <algorithm>

#include "absl/strings/match.h"

namespace ringattn::server::simulation {
namespace {

// Faults and new calls stop after this; what follows must come right.
constexpr absl::Duration kTroubledTime = absl::Seconds(45);
CoordinatorConfig MakeConfig(Random& random) {
  CoordinatorConfig config;
  config.limits.max_queued_requests = random.OneIn(4) ? 4 : 64;
  config.limits.max_queued_bytes = random.OneIn(4) ? 50000 : 1 << 30;
  config.limits.upload_idle_timeout = absl::Seconds(10);
  config.limits.download_idle_timeout = absl::Seconds(10);
  config.limits.finished_operations_kept = 8;
  if (random.OneIn(4)) config.limits.max_queued_requests_per_client = 2;
  config.limits.max_residual_bytes = random.OneIn(3) ? 20000 : 1 << 30;
  config.limits.ended_residuals_kept = 1 << 20;  // so that no end is forgotten
  config.residual_replay_time = absl::Seconds(5);
  config.transfer_timeout = absl::Seconds(15);
  if (random.OneIn(3)) config.loss_drain_timeout = random.Below(2) * absl::Seconds(3);
  config.kv_orphan_time = absl::Seconds(10);
  config.limits.single_device_threshold_tokens = 500;
  return config;
}

}  // namespace

SimulationResult Simulate(uint64_t seed, bool traced) { return Simulation(seed, traced).Run(); }

Simulation::Simulation(uint64_t seed, bool traced)
    : world_(seed, traced),
      config_(MakeConfig(world_.random)),
      checker_(&world_, config_),
      control_(&world_, config_, &checker_),
      clients_(
          &world_, &control_, [this](const std::string& name) { return FindByName(name); },
          [this](const std::string& request_id) {
            return std::any_of(workers_.begin(), workers_.end(),
                               [&](const auto& worker) { return worker->WritesFor(request_id); });
          }),
      kv_writers_(&world_, &control_,
                  [this](const std::string& name) { return FindByName(name); }) {
  ControlPlane::Hooks hooks;
  hooks.client_action = [this](const Action& action) {
    clients_.OnAction(action);
    kv_writers_.OnAction(action);
  };
  hooks.restarted = [this] {
    clients_.OnCoordinatorRestarted();
    kv_writers_.OnCoordinatorRestarted();
  };
  // The launcher replaces processes that the coordinator gave up and cannot dial.
  hooks.dropped = [this](SimWorker* worker, uint64_t process) {
    world_.scheduler.After(world_.random.Between(absl::Seconds(1), absl::Seconds(3)),
                           [worker, process] {
                             const bool helpless = worker->stopped() || worker->stuck();
                             if (worker->process() == process && helpless)
                               worker->Kill(/*silently=*/false);
                           });
  };
  control_.set_hooks(std::move(hooks));
}

void Simulation::MakeWorkers() {
  Random& random = world_.random;
  const bool hosts_matter = world_.weather >= Weather::kHostDies;
  const int count =
      hosts_matter ? 2 + random.Below(kMaxWorkers - 1) : 1 + random.Below(kMaxWorkers);
  // A rank waits for its slower neighbours as long as their whole pass takes longer
  // (6 steps of 3 tiles, twice with pauses for small runs, and one pause more): only
  // what is far above that may be called a timeout.
  const int speed = random.Below(4);
  // As predicted, runs are short, and sent ahead of others, or not.
  const double flops = random.OneIn(2) ? 1e8 : 0;
  const bool isolates_peers = !random.OneIn(3);
  checker_.set_isolates_peers(isolates_peers);
  const int hosts = hosts_matter || !random.OneIn(2) ? 2 + random.Below(2) : 1;
  for (int i = 0; i < count; ++i) {
    WorkerTraits traits;
    traits.host = absl::StrCat("host-", hosts_matter ? i % hosts : random.Below(hosts));
    if (speed == 0) {
      const bool slow = random.OneIn(2);
      traits.tile_time = slow ? random.Between(absl::Seconds(1), absl::Seconds(5))
                              : random.Between(absl::Milliseconds(1), absl::Milliseconds(300));
    } else if (speed == 1) {
      traits.tile_time = random.Between(absl::Milliseconds(1), absl::Milliseconds(300));
      traits.transfer_timeout = absl::Seconds(12);
    } else {
      traits.tile_time = random.Between(absl::Milliseconds(1), absl::Milliseconds(60));
      traits.transfer_timeout = absl::Milliseconds(3500);
    }
    traits.memory_bytes = random.OneIn(3) ? 40000 : 1 << 20;
    traits.reports_memory = random.OneIn(2);
    traits.workspace_bytes = random.OneIn(3) ? 10000 : 0;
    traits.flops_per_second = flops;
    traits.isolates_peers = isolates_peers;
    workers_.push_back(std::make_unique<SimWorker>(
        &world_, &control_, [this](const std::string& blob) { return FindPeer(blob); },
        absl::StrCat("worker-", i), traits));
    workers_.back()->set_on_kv_change(
        [this](const std::string& cache) { kv_writers_.OnRankChanged(cache); });
    const bool newcomer = i > 0 && world_.weather != Weather::kHostDies && random.OneIn(5);
    const absl::Duration delay = newcomer ? random.Between(absl::Seconds(2), absl::Seconds(30))
                                          : random.Between(absl::ZeroDuration(), absl::Seconds(1));
    world_.scheduler.After(delay, [worker = workers_.back().get()] { worker->Launch(); });
  }
}

SimulationResult Simulation::Run() {
  MakeWorkers();
  control_.Start();
  world_.scheduler.After(absl::Seconds(3), [this] { ArriveForEver(); });
  world_.scheduler.After(absl::Seconds(1), [this] { TendWorkers(); });
  world_.scheduler.After(absl::Seconds(3), [this] { MakeCachesForEver(); });
  if (world_.weather == Weather::kStorm) {
    world_.scheduler.After(absl::Seconds(2), [this] { InjectForEver(); });
  } else if (world_.weather == Weather::kSingleFault) {
    world_.scheduler.After(world_.random.Between(absl::Seconds(5), absl::Seconds(20)),
                           [this] { InjectSingleFault(); });
  } else if (world_.weather == Weather::kHostDies) {
    world_.scheduler.After(world_.random.Between(absl::Seconds(5), absl::Seconds(20)),
                           [this] { KillHost(); });
  } else if (world_.weather == Weather::kHostsParted || world_.weather == Weather::kOneWayCut) {
    world_.scheduler.After(world_.random.Between(absl::ZeroDuration(), absl::Seconds(20)),
                           [this] { CutLinks(); });
  } else if (world_.weather == Weather::kSlowLink) {
    world_.network.slowness =
        world_.random.Between(absl::Milliseconds(100), absl::Milliseconds(800));
  }

  RunUntil(world_.start + kTroubledTime);
  if (!world_.network.cuts.empty()) ServeWhileParted();
  EndFaults();
  if (world_.weather == Weather::kCalm) {
    Await("answers", [this] { return kv_writers_.AllAnswered(); });
    RunUntil(world_.now() + absl::Seconds(1));
    // A command to free a cache may be under way.
    const bool agreed = KvBytesAgree();
    RunUntil(world_.now() + absl::Milliseconds(100));
    if (!agreed && !KvBytesAgree()) world_.Violate("caches are not counted alike");
  }
  Await("peace", [this] { return IsQuiet(); });
  const int world_size = workers_.size();
  clients_.StartGoodCall("fresh", world_size);
  Await("success of a fresh request", [this] { return clients_.Succeeded("fresh") && IsQuiet(); });
  SimulationResult result;
  result.violation = world_.violation;
  result.trace = std::move(world_.trace);
  result.ends = clients_.ends();
  for (const auto& [reason, times] : kv_writers_.ends()) result.ends[reason] += times;
  result.ends["(preempted)"] += world_.preemptions;
  for (const auto& worker : workers_)
    result.ends["(took what was kept)"] += worker->kept_counts().hits;
  result.ends["(outlived a loss)"] += checker_.outlived();
  result.virtual_time = world_.now() - world_.start;
  return result;
}

void Simulation::RunUntil(absl::Time time) {
  while (world_.now() < time && world_.violation.empty() && world_.scheduler.RunOne()) {
  }
}

void Simulation::ArriveForEver() {
  if (arrivals_over_) return;
  clients_.StartRandomCall(workers_.size() + world_.random.OneIn(20));
  const bool burst = world_.random.OneIn(3);
  world_.scheduler.After(world_.random.Between(absl::ZeroDuration(),
                                               burst ? absl::Milliseconds(50) : absl::Seconds(4)),
                         [this] { ArriveForEver(); });
}

void Simulation::MakeCachesForEver() {
  if (arrivals_over_) return;
  kv_writers_.StartRandomCache(static_cast<int>(workers_.size()));
  world_.scheduler.After(world_.random.Between(absl::Milliseconds(100), absl::Seconds(6)),
                         [this] { MakeCachesForEver(); });
}

// The launcher: what has died comes back.
void Simulation::TendWorkers() {
  for (const auto& worker : workers_) {
    const bool dark = world_.network.dark_hosts.count(world_.network.host_of[worker->name()]) > 0;
    if (!worker->alive() && worker->process() > 0 && !dark && world_.random.OneIn(3)) {
      worker->Launch();
    }
  }
  world_.scheduler.After(absl::Milliseconds(500), [this] { TendWorkers(); });
}

// --- faults

SimWorker* Simulation::RandomWorker() {
  return workers_[world_.random.Below(workers_.size())].get();
}

void Simulation::StrikeWorker(SimWorker* worker, bool single) {
  world_.fault_injected = true;
  Random& random = world_.random;
  switch (random.Below(7)) {
    case 0:
      return worker->Kill(/*silently=*/false);
    case 1:
      return worker->Kill(/*silently=*/true);
    case 2:
      worker->Stop();
      if (!single && random.OneIn(2)) {
        world_.scheduler.After(random.Between(absl::Seconds(1), absl::Seconds(10)),
                               [worker] { worker->Resume(); });
      }
      return;
    case 3:
      world_.Trace("fault: ", worker->name(), " will stick");
      return worker->StickNext();
    case 4:
      if (worker->connection() != 0) control_.Break(worker->connection());
      return;
    case 5:
      world_.Trace("fault: ", worker->name(), " will not read");
      return worker->StopReadingNext();
    case 6:
      world_.Trace("fault: ", worker->name(), " will not send");
      return worker->StopSendingNext();
  }
}

// While it computes, if it can be waited for: that is where blame is hard to place.
void Simulation::InjectSingleFault() {
  if (world_.faults_over) return;
  SimWorker* worker = RandomWorker();
  if (!worker->alive() || (!worker->computes() && !world_.random.OneIn(20))) {
    world_.scheduler.After(absl::Milliseconds(20), [this] { InjectSingleFault(); });
    return;
  }
  world_.faulty_worker = worker->name();
  StrikeWorker(worker, /*single=*/true);
}

void Simulation::InjectForEver() {
  if (world_.faults_over) return;
  InjectOneFault();
  world_.scheduler.After(
      world_.random.Between(absl::Milliseconds(10), absl::Seconds(world_.random.OneIn(4) ? 1 : 12)),
      [this] { InjectForEver(); });
}

void Simulation::InjectOneFault() {
  Random& random = world_.random;
  SimWorker* worker = RandomWorker();
  world_.fault_injected = true;
  switch (random.Below(12)) {
    case 0:
    case 1:
      if (worker->connection() == 0) return;
      return control_.Stall(worker->connection(), random.OneIn(2),
                            random.Between(absl::Seconds(1), absl::Seconds(15)));
    case 2:
      return control_.Restart();
    case 3:
      return control_.Pause(random.Between(absl::Milliseconds(100), absl::Seconds(15)));
    case 4:
      world_.Trace("fault: ", worker->name(), " will fail to compute");
      clients_.allow_compute_failures();
      return worker->FailNext();
    case 5:
      world_.Trace("re-form");
      return control_.Feed(ReformRequested{});
    case 6:
      world_.Trace("drain");
      clients_.set_draining(true);
      control_.Feed(DrainRequested{false});
      world_.scheduler.After(random.Between(absl::ZeroDuration(), absl::Seconds(5)),
                             [this] { control_.Feed(DrainRequested{true}); });
      return;
    default:
      return StrikeWorker(worker, /*single=*/false);
  }
}

void Simulation::EndFaults() {
  world_.Trace("faults and arrivals are over");
  world_.faults_over = true;
  arrivals_over_ = true;
  world_.network.dark_hosts.clear();
  for (const auto& worker : workers_) {
    worker->ForgetPlannedFaults();
    worker->Resume();
    if (!worker->alive()) worker->Launch();
  }
  // After any drain or pause that is still in progress.
  world_.scheduler.After(absl::Seconds(16), [this] { control_.Feed(DrainRequested{true}); });
}

// --- the end

bool Simulation::IsQuiet() const {
  if (control_.paused() || !clients_.AllEnded() || !kv_writers_.AllAnswered()) return false;
  const CoordinatorStats stats = control_.core().stats();
  if (stats.ready_workers != static_cast<int>(workers_.size())) return false;
  if (stats.queued_requests + stats.active_requests > 0 || stats.reserved_bytes > 0) return false;
  return std::all_of(workers_.begin(), workers_.end(), [](const auto& worker) {
    return worker->alive() && worker->reserved_bytes() == 0 && worker->kept_bytes() == 0;
  });
}

bool Simulation::KvBytesAgree() const {
  const v1::Topology topology = control_.core().topology();
  for (const v1::WorkerInfo& info : topology.workers()) {
    if (static_cast<int64_t>(info.kv_cache_bytes()) != FindByName(info.name())->kv_bytes()) {
      return false;
    }
  }
  return true;
}

std::string Simulation::Describe() const {
  const CoordinatorStats stats = control_.core().stats();
  std::string text = absl::StrCat(v1::RingState_Name(control_.core().topology().state()), ", ",
                                  stats.ready_workers, " of ", workers_.size(), " ready, ",
                                  stats.queued_requests, " queued, ", stats.active_requests,
                                  " active, ", stats.reserved_bytes, " bytes reserved");
  for (const auto& worker : workers_) {
    absl::StrAppend(&text, "; ", worker->name(), worker->alive() ? "" : " dead",
                    worker->stopped() ? " stopped" : "", worker->stuck() ? " stuck" : "", " holds ",
                    worker->reserved_bytes(), " keeps ", worker->kept_bytes());
  }
  return text;
}

SimWorker* Simulation::FindPeer(const std::string& blob) const {
  SimWorker* worker = FindByName(blob.substr(0, blob.find('#')));
  return worker != nullptr && worker->alive() && worker->blob() == blob ? worker : nullptr;
}

SimWorker* Simulation::FindByName(const std::string& name) const {
  for (const auto& worker : workers_) {
    if (worker->name() == name) return worker.get();
  }
  return nullptr;
}

}  // namespace ringattn::server::simulation
