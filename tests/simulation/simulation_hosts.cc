// Faults of hosts and of the links between them.
#include <set>
#include <string>
#include <vector>

#include "tests/simulation/simulation.h"

namespace ringattn::server::simulation {
namespace {

// Rings that may begin to form while hosts are parted: the workers that join late, each with the
// others or without them, a failed forming for each of two links, and what a reported failure adds.
constexpr int64_t kMaxFormingsWhileParted = 16;
// A host's loss is noticed after 6 s of silence, its survivors stop after 3.5 s, and before that,
// requests on them may run on (loss_drain_timeout).
constexpr absl::Duration kHostLossBound = absl::Milliseconds(9900);

}  // namespace

std::string Simulation::RandomHost() { return world_.network.host_of[RandomWorker()->name()]; }

std::vector<SimWorker*> Simulation::WorkersOn(const std::string& host) const {
  std::vector<SimWorker*> workers;
  for (const auto& worker : workers_) {
    if (world_.network.host_of.at(worker->name()) == host) workers.push_back(worker.get());
  }
  return workers;
}

// Loudly: its streams break within one heartbeat. Silently: at one moment.
void Simulation::KillHost() {
  if (world_.faults_over) return;
  Random& random = world_.random;
  const std::string host = RandomHost();
  const std::vector<SimWorker*> workers = WorkersOn(host);
  const bool all_serve = control_.core().stats().ready_workers == static_cast<int>(workers_.size());
  if (!all_serve) {
    world_.scheduler.After(absl::Milliseconds(20), [this] { KillHost(); });
    return;
  }
  const bool silently = random.OneIn(2);
  world_.Trace("fault: ", host, silently ? " loses power" : " ends");
  world_.fault_injected = true;
  world_.network.dark_hosts.insert(host);
  std::vector<std::string> names;
  for (SimWorker* worker : workers) {
    names.push_back(worker->name());
    const absl::Duration delay =
        silently ? absl::ZeroDuration()
                 : random.Between(absl::ZeroDuration(), absl::Milliseconds(900));
    world_.scheduler.After(delay, [worker, silently] { worker->Kill(silently); });
  }
  checker_.OnHostDies(host, names, silently);
  const absl::Duration bound = kHostLossBound + config_.loss_drain_timeout;
  world_.scheduler.After(bound,
                         [this, formings = checker_.formings()] { CheckDeadHost(formings); });
  world_.scheduler.After(random.Between(bound, absl::Seconds(25)), [this, host] {
    world_.Trace(host, " has power again");
    world_.network.dark_hosts.erase(host);
  });
}

// The survivors' ring forms once.
void Simulation::CheckDeadHost(int64_t formings) {
  if (world_.faults_over) return;
  if (checker_.formings() != formings + 1) {
    world_.Violate(checker_.formings() - formings, " rings formed after a host died");
  }
  if (control_.core().topology().state() != v1::RING_STATE_READY) {
    world_.Violate("the survivors of a dead host do not serve: ", Describe());
  }
}

void Simulation::CutLinks() {
  if (world_.faults_over) return;
  const std::string host = RandomHost();
  const bool outward = world_.weather == Weather::kHostsParted || world_.random.OneIn(2);
  const bool inward = world_.weather == Weather::kHostsParted || !outward;
  world_.Trace("fault: ", host, " is cut off", outward && inward ? "" : " in one direction");
  world_.fault_injected = true;
  for (const auto& [worker, other] : world_.network.host_of) {
    if (other == host) continue;
    if (outward) world_.network.cuts.insert({host, other});
    if (inward) world_.network.cuts.insert({other, host});
  }
  formings_before_cut_ = checker_.formings();
}

void Simulation::ServeWhileParted() {
  arrivals_over_ = true;
  Await("end of requests while parted",
        [this] { return clients_.AllEnded() && kv_writers_.AllAnswered(); });
  // Uses the link, if the ring has not noticed yet. It may fail.
  clients_.StartGoodCall("over-the-cut", static_cast<int>(workers_.size()));
  Await("end of a request over the cut", [this] { return clients_.AllEnded(); });
  clients_.StartGoodCall("parted", /*world_size=*/0);
  Await("service while parted", [this] { return clients_.Succeeded("parted"); });
  if (clients_.Succeeded("over-the-cut")) world_.Violate("a request crossed the cut");
  RunUntil(world_.now() + absl::Seconds(20));
  const v1::Topology topology = control_.core().topology();
  std::set<std::string> members, hosts;
  for (const v1::WorkerInfo& worker : topology.workers()) {
    if (worker.has_rank()) members.insert(worker.name());
    hosts.insert(worker.location().host());
  }
  std::set<std::string> served_hosts;
  for (const std::string& member : members) {
    served_hosts.insert(world_.network.host_of[member]);
    for (const std::string& other : members) {
      if (member != other && !world_.network.Reaches(member, other)) {
        world_.Violate("the ring of ", member, " and ", other, " is cut");
      }
    }
  }
  // One host is cut off from the others, which reach each other.
  if (served_hosts.size() + 1 != hosts.size() && hosts.size() > 2) {
    world_.Violate(served_hosts.size(), " hosts serve of ", hosts.size());
  }
  const int64_t formings = checker_.formings() - formings_before_cut_;
  if (formings > kMaxFormingsWhileParted) world_.Violate(formings, " rings formed while parted");
  world_.Trace("the links work again after ", formings, " formings");
  world_.network.cuts.clear();
}

}  // namespace ringattn::server::simulation
