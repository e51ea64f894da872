#include <cstdio>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/command.h"
#include "client/cli/flag_set.h"
#include "client/launcher/state_dir.h"
#include "common/base/monotonic_time.h"

namespace ringattn::client::cli {
namespace {

struct Flags {
  std::string state_dir = DefaultStateDir();
  std::string timeout;  // empty: the launcher's own
};

int RunDown(const Flags& flags) {
  absl::Duration timeout = EndTimeout(flags.state_dir);
  if (!flags.timeout.empty() &&
      (!absl::ParseDuration(flags.timeout, &timeout) || timeout < absl::ZeroDuration())) {
    return Fail(
        absl::InvalidArgumentError("--timeout is not a duration; expected a value like 30s"),
        false);
  }
  const absl::Time start = MonotonicNow();
  const auto report = [&](const std::vector<std::string>& running) {
    std::fprintf(stderr, "after %.0f s of at most %.0f: %s\n",
                 absl::ToDoubleSeconds(MonotonicNow() - start), absl::ToDoubleSeconds(timeout),
                 running.empty()
                     ? "waiting for the launcher"
                     : absl::StrCat("still running: ", absl::StrJoin(running, ", ")).c_str());
  };
  const auto stopped = StopLauncher(flags.state_dir, timeout, report);
  if (!stopped.ok()) return Fail(stopped.status(), false);
  std::printf(*stopped ? "ended\n" : "nothing runs in %s\n", flags.state_dir.c_str());
  return kSuccess;
}

}  // namespace

void AddDown(FlagSet& program, Run& run) {
  auto flags = std::make_shared<Flags>();
  FlagSet& command =
      program.AddCommand("down",
                         "End what `ringattn up` started: requests in flight may continue for its "
                         "--drain_timeout, new "
                         "ones are rejected; then the coordinator ends, then the workers");
  command.Add("--state_dir", &flags->state_dir, "The state folder of `up`").ShowDefault();
  command.Add(
      "--timeout", &flags->timeout,
      "Kill everything after this long; default: --drain_timeout plus --stop_timeout of `up` "
      "plus 5s");
  command.OnChosen([flags, &run] { run = [flags] { return RunDown(*flags); }; });
}

}  // namespace ringattn::client::cli
