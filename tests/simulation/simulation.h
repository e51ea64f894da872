// One life of a service in virtual time, determined by a seed: workers, clients and faults, and the
// check that the service recovers in the end.
#ifndef RINGATTN_TESTS_SIMULATION_SIMULATION_H_
#define RINGATTN_TESTS_SIMULATION_SIMULATION_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/simulation/clients.h"
#include "tests/simulation/kv_writers.h"

namespace ringattn::server::simulation {

// In which at least one request must end, while there are any, and the ring be whole
// again. The slowest legal way: a stuck rank is found (20 s, or 45 s where it sends
// nothing), a slow client finishes (20 s up, 20 s down, or 40 s where a member rests), and a
// slow ring computes (6 steps of 3 tiles of 5 s).
inline constexpr absl::Duration kRecoveryBound = absl::Seconds(180);

struct SimulationResult {
  std::string violation;                // empty: every rule was kept
  std::vector<std::string> trace;       // if traced
  std::map<std::string, int64_t> ends;  // of streams, by reason
  absl::Duration virtual_time;
};

// The same seed gives the same result.
SimulationResult Simulate(uint64_t seed, bool traced);

// Not thread safe.
class Simulation {
 public:
  Simulation(uint64_t seed, bool traced);
  SimulationResult Run();

 private:
  void MakeWorkers();
  void ArriveForEver();
  void MakeCachesForEver();
  void TendWorkers();
  void InjectForEver();
  void InjectOneFault();
  void InjectSingleFault();
  void StrikeWorker(SimWorker* worker, bool single);
  void EndFaults();
  // simulation_hosts.cc: faults of hosts and of the links between them
  void KillHost();
  void CheckDeadHost(int64_t formings);
  void CutLinks();
  // Checks that one side serves while hosts are parted, and heals the links.
  void ServeWhileParted();
  std::vector<SimWorker*> WorkersOn(const std::string& host) const;
  std::string RandomHost();
  bool IsQuiet() const;
  // Coordinator and workers count the same bytes of K/V caches.
  bool KvBytesAgree() const;
  void RunUntil(absl::Time time);
  // Runs until `done` holds; a violation naming `what` if nothing leads there.
  template <typename Done>
  void Await(const char* what, Done done);
  SimWorker* RandomWorker();
  SimWorker* FindPeer(const std::string& blob) const;
  SimWorker* FindByName(const std::string& name) const;
  std::string Describe() const;

  World world_;
  CoordinatorConfig config_;
  Checker checker_;
  ControlPlane control_;
  Clients clients_;
  KvWriters kv_writers_;
  std::vector<std::unique_ptr<SimWorker>> workers_;
  bool arrivals_over_ = false;
  int64_t formings_before_cut_ = 0;
};

template <typename Done>
void Simulation::Await(const char* what, Done done) {
  const absl::Time begin = world_.now();
  while (world_.violation.empty() && !done()) {
    const absl::Duration idle = world_.now() - std::max(begin, clients_.last_end());
    if (idle > kRecoveryBound) {
      world_.Violate("no ", what, " within ", absl::FormatDuration(idle), ": ", Describe());
    }
    RunUntil(world_.now() + absl::Milliseconds(200));
  }
}

}  // namespace ringattn::server::simulation

#endif  // RINGATTN_TESTS_SIMULATION_SIMULATION_H_
