// State shared by the parts of a simulation: time, random numbers, the trace, and the verdict.
#ifndef RINGATTN_TESTS_SIMULATION_WORLD_H_
#define RINGATTN_TESTS_SIMULATION_WORLD_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tests/simulation/network.h"
#include "tests/simulation/random.h"
#include "tests/simulation/scheduler.h"

namespace ringattn::server::simulation {

inline constexpr int kMaxWorkers = 6;

// The faults that a seed injects.
enum class Weather {
  kCalm,         // slow workers and fickle clients, no fault: nothing may be lost
  kSingleFault,  // one worker fails, and it alone may be blamed
  kStorm,        // anything, repeatedly
  kHostDies,     // all workers of one host fail together
  kHostsParted,  // one host and the others cannot reach each other; all reach the coordinator
  kOneWayCut,    // the same in one direction only
  kSlowLink,     // transfers between hosts take long: nothing may be lost
};
inline constexpr int kWeathers = 7;

// Not thread safe.
class World {
 public:
  World(uint64_t seed, bool traced) : random(seed), traced_(traced) {
    weather = static_cast<Weather>(seed % kWeathers);
  }

  absl::Time now() const { return scheduler.now(); }

  template <typename... Parts>
  void Trace(const Parts&... parts) {
    if (!traced_) return;
    trace.push_back(absl::StrFormat("%9.3f ", absl::ToDoubleSeconds(now() - start)) +
                    absl::StrCat(parts...));
  }

  // The first violation is the verdict.
  template <typename... Parts>
  void Violate(const Parts&... parts) {
    if (!violation.empty()) return;
    violation = absl::StrCat(parts...);
    Trace("VIOLATION ", violation);
  }

  Scheduler scheduler;
  Random random;
  Network network;
  Weather weather;
  const absl::Time start = scheduler.now();
  bool faults_over = false;
  // Something happened that may end generations, for a legal reason.
  bool fault_injected = false;
  // kSingleFault: the worker it was done to.
  std::string faulty_worker;
  int64_t preemptions = 0;  // runs that paused for a small one
  std::string violation;
  std::vector<std::string> trace;

 private:
  const bool traced_;
};

}  // namespace ringattn::server::simulation

#endif  // RINGATTN_TESTS_SIMULATION_WORLD_H_
