#include <cstdio>
#include <memory>
#include <set>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "client/api/client.h"
#include "client/cli/command.h"
#include "client/cli/flag_set.h"
#include "client/cli/flags.h"
#include "client/cli/proto_json.h"
#include "client/cli/report.h"
#include "client/cli/server_flags.h"
#include "common/base/counted.h"
#include "nlohmann/json.hpp"

namespace ringattn::client::cli {
namespace {

struct TopologyFlags {
  ServerFlags server;
  std::string deadline;
  bool watch = false;
  bool json = false;
};

void PrintText(const v1::Topology& topology) {
  const std::string state =
      absl::AsciiStrToLower(absl::StripPrefix(v1::RingState_Name(topology.state()), "RING_STATE_"));
  std::set<std::string> hosts;
  for (const v1::WorkerInfo& worker : topology.workers()) hosts.insert(worker.location().host());
  std::printf("ring %s, generation %llu, %s on %s\n", state.c_str(),
              static_cast<unsigned long long>(topology.generation()),
              Counted(topology.workers_size(), "worker").c_str(),
              Counted(static_cast<int64_t>(hosts.size()), "host").c_str());
  if (topology.workers_size() == 0) return;
  std::printf("%-4s  %-16s  %-12s  %-10s  %-20s  %7s  %10s  %10s  %s\n", "rank", "name", "host",
              "state", "device", "threads", "memory", "reserved", "data address");
  for (const v1::WorkerInfo& worker : topology.workers()) {
    // Boot ids are long, and their first characters differ.
    const std::string host = worker.location().host().substr(0, 12);
    std::printf("%-4s  %-16s  %-12s  %-10s  %-20s  %7u  %10s  %10s  %s\n",
                worker.has_rank() ? absl::StrCat(worker.rank()).c_str() : "-",
                worker.name().c_str(), host.empty() ? "-" : host.c_str(),
                ShortName(worker.state()).c_str(), worker.device().c_str(), worker.threads(),
                HumanBytes(worker.memory_bytes()).c_str(),
                HumanBytes(worker.reserved_bytes()).c_str(), worker.data_address().c_str());
  }
}

void Show(const v1::Topology& topology, const TopologyFlags& flags) {
  if (!flags.json) {
    PrintText(topology);
  } else if (flags.watch) {
    // One line each, so that a reader can separate them.
    std::puts(ProtoJson(topology).dump().c_str());
  } else {
    Print(ProtoJson(topology));
  }
  std::fflush(stdout);
}

int RunTopology(const TopologyFlags& flags) {
  const std::string text = flags.deadline.empty() && !flags.watch ? "10s" : flags.deadline;
  const auto deadline = ParseDeadline(text);
  if (!deadline.ok()) return Fail(deadline.status(), flags.json);
  auto client = flags.server.Connect({.channels = 1});
  if (!client.ok()) return Fail(client.status(), flags.json);
  if (!flags.watch) {
    const auto topology = (*client)->GetTopology(*deadline);
    if (!topology.ok()) return Fail(topology.status(), flags.json);
    Show(*topology, flags);
    return kSuccess;
  }
  const absl::Status status = (*client)->WatchTopology(
      [&](const v1::Topology& topology) {
        Show(topology, flags);
        return true;
      },
      *deadline);
  return Fail(status, flags.json);
}

}  // namespace

void AddTopology(FlagSet& program, Run& run) {
  auto flags = std::make_shared<TopologyFlags>();
  FlagSet& command = program.AddCommand("topology", "The present workers and ring");
  flags->server.AddTo(command);
  command.Add("--watch", &flags->watch,
              "Print again after each change, until interrupted or the server ends");
  command.Add("--deadline", &flags->deadline, "Limit of the call; default: 10s, none with --watch");
  command.Add("--json", &flags->json,
              "Print one JSON object, with --watch one per line (docs/cli-json.md)");
  command.OnChosen([flags, &run] { run = [flags] { return RunTopology(*flags); }; });
}

}  // namespace ringattn::client::cli
