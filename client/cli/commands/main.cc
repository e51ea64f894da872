// The ringattn command line: commands, parsing and exit codes.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <optional>

#include "absl/synchronization/mutex.h"
#include "client/cli/command.h"
#include "client/cli/flag_set.h"
#include "common/base/version.h"
#include "common/wire/allocator.h"

int main(int argc, char** argv) {
  using namespace ringattn::client::cli;
  ringattn::wire::KeepFreedMemory();
  // As in server/main.cc.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  // A write to a closed pipe must return an error instead of ending the process.
  std::signal(SIGPIPE, SIG_IGN);
  FlagSet program(
      "ringattn",
      "Exact attention as a service: generate inputs, call the service, verify its results, run it "
      "locally.\nExit codes: 0 success, 1 a result is wrong (verify, bench), 2 wrong usage, 3 any "
      "other failure, 4 not everything could be judged (verify).",
      ringattn::kVersion);
  Run run;
  AddGenerate(program, run);
  AddForward(program, run);
  AddBackward(program, run);
  AddVerify(program, run);
  AddPlan(program, run);
  AddInfo(program, run);
  AddTopology(program, run);
  AddBench(program, run);
  AddCache(program, run);
  AddUp(program, run);
  AddDown(program, run);
  AddWorkers(program, run);
  if (const std::optional<int> ended = program.Parse(argc, argv)) {
    return *ended == 0 ? kSuccess : kUsage;
  }
  const int code = run();
  // All output has been written and closed. _Exit skips the static destructors, which must not run
  // concurrently with the gRPC threads that are still finishing the last call.
  std::fflush(nullptr);
  std::cout.flush();
  std::cerr.flush();
  std::_Exit(code);
}
