// A client that calls again and again while the service is disturbed, and judges every result in
// fp64: cases of the sweep (dtypes, layouts, masks, windows, softcap, grouped heads, packed
// documents, sinks, both directions), one call at a time and none replayed, so that each line is
// one RPC:
//
//   BEGIN END METHOD CODE REASON JUDGEMENT     (seconds of the clock; the server's reason, - if
//   1.25 1.31 Forward OK - right                it gave none; right, WRONG, or none)
//
// Ends once its standard input does, with the call that is in flight. Exits 1 if a result was
// wrong.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/api/client.h"
#include "client/api/error.h"
#include "tests/cases/case_generator.h"
#include "tests/e2e/service_case.h"

ABSL_FLAG(std::string, server, "", "host:port of the service");
ABSL_FLAG(uint64_t, seed, 1, "seed of the cases");
ABSL_FLAG(int64_t, cases, 2000, "that are drawn; then they come again");
ABSL_FLAG(int64_t, max_cost, 8'000'000, "of a case, see case_generator.h");
ABSL_FLAG(int, max_world_size, 4, "cut larger rings to this");
ABSL_FLAG(absl::Duration, deadline, absl::Seconds(60), "of a call");
ABSL_FLAG(absl::Duration, pause_after_error, absl::Milliseconds(100), "before the next call");

namespace ringattn::tests {
namespace {

void Print(absl::Time begin, const Case& c, const ServiceOutcome& outcome) {
  const bool ok = outcome.status.ok();
  const bool typed = !ok && !client::DetailsOf(outcome.status).reason.empty();
  const std::string reason = typed ? client::DetailsOf(outcome.status).reason : "-";
  std::printf("%.6f %.6f %s %s %s %s\n", absl::ToDoubleSeconds(begin - absl::UnixEpoch()),
              absl::ToDoubleSeconds(outcome.ended - absl::UnixEpoch()),
              c.direction == Direction::kForward ? "Forward" : "Backward",
              absl::StatusCodeToString(outcome.status.code()).c_str(), reason.c_str(),
              !ok                         ? "none"
              : outcome.judgement.empty() ? "right"
                                          : "WRONG");
  std::fflush(stdout);
  if (!outcome.judgement.empty()) {
    std::fprintf(stderr, "WRONG %s\n%s\n", ToString(c).c_str(), outcome.judgement.c_str());
  } else if (!ok && !typed) {
    std::fprintf(stderr, "untyped: %s\n", outcome.status.ToString().c_str());
  }
}

int Run() {
  std::vector<Case> cases = GenerateCases(absl::GetFlag(FLAGS_seed), absl::GetFlag(FLAGS_cases),
                                          absl::GetFlag(FLAGS_max_cost));
  for (Case& c : cases) {
    AddOptions(c);
    CutRing(c, absl::GetFlag(FLAGS_max_world_size));
  }
  client::ClientOptions options;
  options.channels = 1;
  options.retry.max_replays = 0;
  auto client = client::Client::Connect(absl::GetFlag(FLAGS_server), options);
  if (!client.ok()) {
    std::fprintf(stderr, "%s\n", client.status().ToString().c_str());
    return 2;
  }
  std::atomic<bool> stops = false;
  std::thread watch([&stops] {
    char byte;
    while (read(STDIN_FILENO, &byte, 1) > 0) {
    }
    stops = true;
  });
  int wrong = 0;
  for (size_t i = 0; !stops; ++i) {
    const Case& c = cases[i % cases.size()];
    const absl::Time begin = absl::Now();
    ServiceOutcome outcome = RunThroughService(**client, c, absl::GetFlag(FLAGS_deadline));
    wrong += !outcome.judgement.empty();
    Print(begin, c, outcome);
    if (!outcome.status.ok()) absl::SleepFor(absl::GetFlag(FLAGS_pause_after_error));
  }
  watch.join();
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace ringattn::tests

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return ringattn::tests::Run();
}
