// Runs the simulation over many seeds.
//
//   simulation_test                 2,000 seeds
//   simulation_test --seeds=10000   more of them
//   simulation_test --seed=17       one, with its whole trace
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <map>
#include <optional>
#include <string>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "tests/simulation/simulation.h"

ABSL_FLAG(int64_t, seeds, 2000, "How many seeds to run");
ABSL_FLAG(int64_t, first_seed, 1, "The first of them");
ABSL_FLAG(std::optional<int64_t>, seed, std::nullopt, "Run this seed only and print its trace");
ABSL_FLAG(int64_t, tail, 60, "Trace lines to print after a failure");

namespace ringattn::server::simulation {
namespace {

void PrintTrace(const SimulationResult& result, size_t lines) {
  const size_t count = result.trace.size();
  for (size_t i = count - std::min(count, lines); i < count; ++i) {
    std::printf("%s\n", result.trace[i].c_str());
  }
}

// Prints seed and trace of a failure, which running it again gives.
bool Passes(int64_t seed, SimulationResult* result) {
  *result = Simulate(seed, /*traced=*/false);
  if (result->violation.empty()) return true;
  const SimulationResult again = Simulate(seed, /*traced=*/true);
  PrintTrace(again, absl::GetFlag(FLAGS_tail));
  std::printf("FAILED --seed=%lld: %s\n", static_cast<long long>(seed), result->violation.c_str());
  if (again.violation != result->violation) std::printf("not reproduced: not deterministic\n");
  return false;
}

int Main() {
  if (const std::optional<int64_t> seed = absl::GetFlag(FLAGS_seed)) {
    const SimulationResult result = Simulate(*seed, /*traced=*/true);
    PrintTrace(result, result.trace.size());
    std::printf("%s --seed=%lld %s\n", result.violation.empty() ? "PASSED" : "FAILED",
                static_cast<long long>(*seed), result.violation.c_str());
    return result.violation.empty() ? 0 : 1;
  }
  const int64_t first = absl::GetFlag(FLAGS_first_seed);
  const int64_t count = absl::GetFlag(FLAGS_seeds);
  int64_t failed = 0;
  std::map<std::string, int64_t> ends;
  absl::Duration virtual_time;
  for (int64_t seed = first; seed < first + count; ++seed) {
    SimulationResult result;
    failed += !Passes(seed, &result);
    for (const auto& [reason, times] : result.ends) ends[reason] += times;
    virtual_time += result.virtual_time;
    if (failed >= 3) break;
  }
  for (const auto& [reason, times] : ends) {
    std::printf("%9lld %s\n", static_cast<long long>(times), reason.c_str());
  }
  std::printf("%lld seeds from %lld in %s of virtual time: %lld failed\n",
              static_cast<long long>(count), static_cast<long long>(first),
              absl::FormatDuration(absl::Trunc(virtual_time, absl::Seconds(1))).c_str(),
              static_cast<long long>(failed));
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace ringattn::server::simulation

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return ringattn::server::simulation::Main();
}
