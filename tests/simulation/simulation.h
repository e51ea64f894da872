// One life of a service in virtual time, determined by a seed: workers, clients and faults, and the
// check that the service recovers in the end.
#ifndef RINGATTN_TESTS_SIMULATION_SIMULATION_H_
#define RINGATTN_TESTS_SIMULATION_SIMULATION_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/simulation/clients.h"
#include "tests/simulation/kv_writers.h"

namespace ringattn::server::simulation {

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
};

}  // namespace ringattn::server::simulation

#endif  // RINGATTN_TESTS_SIMULATION_SIMULATION_H_
