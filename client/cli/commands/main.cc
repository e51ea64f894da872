// ringattn: the command line.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <iostream>

#include "CLI/CLI.hpp"
#include "client/cli/command.h"
#include "common/base/version.h"
#include "common/wire/allocator.h"

int main(int argc, char** argv) {
  using namespace ringattn::client::cli;
  ringattn::wire::KeepFreedMemory();
  // A closed pipe is an error of the write, not the end of the process.
  std::signal(SIGPIPE, SIG_IGN);
  CLI::App app(
      "Exact attention as a service: make inputs, call the service, check its results, run it "
      "locally.\nExit codes: 0 done, 1 a result is wrong (verify, bench), 2 wrong usage, 3 any "
      "other failure, 4 not everything could be judged (verify).",
      "ringattn");
  app.require_subcommand(1);
  app.set_version_flag("--version", std::string(ringattn::kVersion));
  app.get_formatter()->column_width(36);
  Run run;
  AddGenerate(app, run);
  AddForward(app, run);
  AddBackward(app, run);
  AddVerify(app, run);
  AddPlan(app, run);
  AddInfo(app, run);
  AddTopology(app, run);
  AddBench(app, run);
  AddUp(app, run);
  AddDown(app, run);
  AddWorkers(app, run);
  // CLI11 reports by exceptions; they end here.
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kSuccess : kUsage;
  }
  const int code = run();
  // gRPC's threads are still letting go of the last call; static destructors must not
  // run beside them. Everything that matters has been written and closed.
  std::fflush(nullptr);
  std::cout.flush();
  std::cerr.flush();
  std::_Exit(code);
}
