#include <cstdio>
#include <memory>

#include "absl/strings/ascii.h"
#include "absl/strings/str_join.h"
#include "client/api/client.h"
#include "client/cli/command.h"
#include "client/cli/flag_set.h"
#include "client/cli/flags.h"
#include "client/cli/proto_json.h"
#include "client/cli/report.h"
#include "client/cli/server_flags.h"
#include "nlohmann/json.hpp"

namespace ringattn::client::cli {
namespace {

struct InfoFlags {
  ServerFlags server;
  std::string deadline = "10s";
  bool json = false;
};

template <typename Enum>
std::string Names(const google::protobuf::RepeatedField<int>& values) {
  return absl::StrJoin(values, ", ", [](std::string* out, int value) {
    out->append(ShortName(static_cast<Enum>(value)));
  });
}

void PrintText(const v1::GetServerInfoResponse& info) {
  std::printf("version    %s\n", info.version().c_str());
  std::printf("dtypes     %s\n", Names<v1::DataType>(info.dtypes()).c_str());
  std::printf("layouts    %s\n", Names<v1::Layout>(info.layouts()).c_str());
  std::printf("schedules  %s\n", Names<v1::Schedule>(info.schedules()).c_str());
  std::printf("options    %s\n", absl::StrJoin(info.options(), ", ").c_str());
  std::puts("limits");
  const Json limits = ProtoJson(info.limits());
  for (const auto& [name, value] : limits.items()) {
    std::printf("  %-32s %s\n", name.c_str(),
                (value.is_string() ? value.get<std::string>() : value.dump()).c_str());
  }
}

int RunInfo(const InfoFlags& flags) {
  const auto deadline = ParseDeadline(flags.deadline);
  if (!deadline.ok()) return Fail(deadline.status(), flags.json);
  auto client = flags.server.Connect({.channels = 1});
  if (!client.ok()) return Fail(client.status(), flags.json);
  const auto info = (*client)->GetServerInfo(*deadline);
  if (!info.ok()) return Fail(info.status(), flags.json);
  if (flags.json) {
    Print(ProtoJson(*info));
  } else {
    PrintText(*info);
  }
  return kSuccess;
}

}  // namespace

void AddInfo(FlagSet& program, Run& run) {
  auto flags = std::make_shared<InfoFlags>();
  FlagSet& command = program.AddCommand("info", "Version, features and limits of a service");
  flags->server.AddTo(command);
  command.Add("--deadline", &flags->deadline, "Limit of the call").ShowDefault();
  command.Add("--json", &flags->json, "Print one JSON object (docs/cli-json.md)");
  command.OnChosen([flags, &run] { run = [flags] { return RunInfo(*flags); }; });
}

}  // namespace ringattn::client::cli
