#include <cstdio>
#include <memory>

#include "client/cli/command.h"
#include "client/launcher/state_dir.h"

namespace ringattn::client::cli {
namespace {

struct Flags {
  std::string state_dir = DefaultStateDir();
  std::string timeout = "30s";
};

int RunDown(const Flags& flags) {
  absl::Duration timeout;
  if (!absl::ParseDuration(flags.timeout, &timeout) || timeout < absl::ZeroDuration()) {
    return Fail(absl::InvalidArgumentError("--timeout: not a duration like 30s"), false);
  }
  const auto stopped = StopLauncher(flags.state_dir, timeout);
  if (!stopped.ok()) return Fail(stopped.status(), false);
  std::printf(*stopped ? "ended\n" : "nothing runs in %s\n", flags.state_dir.c_str());
  return kSuccess;
}

}  // namespace

void AddDown(CLI::App& app, Run& run) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand("down", "End what `ringattn up` started");
  command->add_option("--state_dir", flags->state_dir, "The one that `up` was given")
      ->capture_default_str();
  command->add_option("--timeout", flags->timeout, "Kill it if it has not ended by then")
      ->capture_default_str();
  command->callback([flags, &run] { run = [flags] { return RunDown(*flags); }; });
}

}  // namespace ringattn::client::cli
