// The sweep's cases once more, through the public API: a running service, the
// client library, and the oracle as the judge.
//
//   service_sweep --server=127.0.0.1:7700 --cases=160
//
// The service needs as many workers as the largest ring: 8, or --max_world_size, to
// which the cases' rings are cut. Prints one line per failure and a summary; exits 1
// unless every case that was run passed.
#include <atomic>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/api/client.h"
#include "client/api/error.h"
#include "tests/cases/case_generator.h"
#include "tests/e2e/service_case.h"

ABSL_FLAG(std::string, server, "", "host:port of the service");
ABSL_FLAG(int64_t, cases, 160, "number of cases");
ABSL_FLAG(int64_t, case, -1, "run this case alone");
ABSL_FLAG(uint64_t, seed, 77, "seed of the cases");
ABSL_FLAG(bool, options, false,
          "add what only some requests have: attention sinks, a gradient of lse, score terms");
ABSL_FLAG(bool, probabilities, false,
          "ask for those of some rows, in forward cases of schedules that give them");
ABSL_FLAG(bool, float8, true, "with --options also forwards in e4m3 (compute_dtype)");
ABSL_FLAG(bool, score_terms, true,
          "with --options: score terms too, which some kernels serve much more slowly");
ABSL_FLAG(std::string, transport, "auto", "auto, relay, direct or host, as the command line's");
ABSL_FLAG(int, max_world_size, 8, "cut larger rings to this");
ABSL_FLAG(int, threads, 1, "clients that run cases side by side");
ABSL_FLAG(absl::Duration, budget, absl::InfiniteDuration(), "begin no case after this long");

namespace ringattn::tests {

using namespace ringattn::client;  // what is under test
namespace {

// The state that the clients share.
struct Progress {
  std::vector<Case> cases;
  absl::Time end;
  std::atomic<size_t> next{0};
  absl::Mutex mutex;
  std::vector<Case> run ABSL_GUARDED_BY(mutex);
  int failed ABSL_GUARDED_BY(mutex) = 0;
};

void RunCases(Client& client, Progress& progress) {
  for (size_t i; (i = progress.next++) < progress.cases.size() && absl::Now() < progress.end;) {
    const Case& c = progress.cases[i];
    const ServiceOutcome outcome =
        RunThroughService(client, c, absl::Seconds(60), absl::GetFlag(FLAGS_transport));
    absl::MutexLock lock(&progress.mutex);
    progress.run.push_back(c);
    if (outcome.passed()) continue;
    const std::string reason =
        outcome.status.ok() ? outcome.judgement : FormatError(outcome.status);
    ++progress.failed;
    std::printf("FAILED --seed=%llu %s\n%s\n",
                static_cast<unsigned long long>(absl::GetFlag(FLAGS_seed)), ToString(c).c_str(),
                reason.c_str());
  }
}

int Run() {
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < absl::GetFlag(FLAGS_threads); ++i) {
    auto client = Client::Connect(absl::GetFlag(FLAGS_server));
    if (!client.ok()) {
      std::fprintf(stderr, "%s\n", client.status().ToString().c_str());
      return 2;
    }
    clients.push_back(*std::move(client));
  }
  const int64_t only = absl::GetFlag(FLAGS_case);
  Progress progress;
  progress.end = absl::Now() + absl::GetFlag(FLAGS_budget);
  for (Case& c : GenerateCases(absl::GetFlag(FLAGS_seed),
                               only >= 0 ? only + 1 : absl::GetFlag(FLAGS_cases))) {
    if (only >= 0 && c.index != only) continue;
    if (absl::GetFlag(FLAGS_options)) {
      AddOptions(c, absl::GetFlag(FLAGS_score_terms), absl::GetFlag(FLAGS_float8));
    }
    if (absl::GetFlag(FLAGS_probabilities)) AddProbabilityRows(c);
    CutRing(c, absl::GetFlag(FLAGS_max_world_size));
    progress.cases.push_back(std::move(c));
  }
  std::vector<std::thread> threads;
  for (auto& client : clients) {
    threads.emplace_back([&client, &progress] { RunCases(*client, progress); });
  }
  for (std::thread& thread : threads) thread.join();
  absl::MutexLock lock(&progress.mutex);
  std::printf("%s\n", ToString(CoverageOf(progress.run)).c_str());
  std::printf("service sweep: %zu cases, %d failed\n", progress.run.size(), progress.failed);
  return progress.failed == 0 && !progress.run.empty() ? 0 : 1;
}

}  // namespace
}  // namespace ringattn::tests

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return ringattn::tests::Run();
}
