#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/api/client.h"
#include "client/cli/command.h"
#include "client/cli/flag_set.h"
#include "client/cli/flags.h"
#include "client/cli/planner_inputs.h"
#include "client/cli/report.h"
#include "client/cli/server_flags.h"
#include "common/plan/planner.h"
#include "common/schedule/schedule.h"
#include "nlohmann/json.hpp"

namespace ringattn::client::cli {
namespace {

struct PlanFlags {
  ShapeFlags shape;
  OptionFlags options;
  bool backward = false;
  bool with_forward_result = false;
  bool dlse = false;
  v1::LseFormat lse_format = v1::LSE_FORMAT_UNSPECIFIED;
  v1::Packing packing = v1::PACKING_UNSPECIFIED;
  std::vector<v1::ProbabilityRow> probability_rows;
  ServerFlags server;
  std::string deadline = "10s";
  std::optional<int> workers;  // default: kDefaultWorkers, or the server's ring
  std::optional<double> device_flops_per_s;
  std::optional<double> link_bytes_per_s;
  std::optional<int> hosts;  // default: 1, or the hosts of the server's ring
  std::optional<double> host_link_bytes_per_s;
  std::optional<double> host_total_bytes_per_s;
  bool json = false;
};

constexpr int kDefaultWorkers = 4;

struct Planned {
  Problem problem;
  PlannerInputs inputs;
  AttentionSpec spec;
  Plan plan;
  Schedule schedule;
  std::vector<std::string> members;  // as requested
};

// The inputs that the service's own planner would use (server/core/ring/measured_inputs.h).
absl::StatusOr<PlannerInputs> InputsOfServer(const PlanFlags& flags, const ValidRequest& request) {
  const auto deadline = ParseDeadline(flags.deadline);
  if (!deadline.ok()) return deadline.status();
  auto client = flags.server.Connect({.channels = 1});
  if (!client.ok()) return client.status();
  const auto info = (*client)->GetServerInfo(*deadline);
  if (!info.ok()) return info.status();
  const auto topology = (*client)->GetTopology(*deadline);
  if (!topology.ok()) return topology.status();
  std::vector<std::string> ready;
  for (const v1::WorkerInfo& worker : topology->workers()) {
    if (worker.has_rank()) ready.push_back(worker.name());
  }
  for (const std::string& name : request.choice.members) {
    if (std::find(ready.begin(), ready.end(), name) != ready.end()) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "plan.members: worker ", name,
        " is not ready; ready workers: ", ready.empty() ? "none" : absl::StrJoin(ready, ", ")));
  }
  PlannerInputs inputs =
      InputsOf(*topology, request.spec, request.direction, request.choice.members,
               static_cast<double>(info->limits().default_host_link_bytes_per_second()));
  inputs.single_device_threshold_tokens =
      static_cast<int64_t>(info->limits().single_device_threshold_tokens());
  return inputs;
}

absl::StatusOr<PlannerInputs> InputsOf(const PlanFlags& flags, const ValidRequest& request) {
  PlannerInputs inputs;
  if (flags.server.server.empty()) {
    // Without a server, all requested workers count as ready.
    inputs.ready_workers =
        std::max(flags.workers.value_or(kDefaultWorkers), request.choice.world_size.value_or(0));
  } else {
    auto measured = InputsOfServer(flags, request);
    if (!measured.ok()) return measured.status();
    inputs = *measured;
    if (flags.workers || flags.hosts) inputs.hosts.clear();
    if (flags.workers) inputs.ready_workers = *flags.workers;
  }
  if (flags.hosts && inputs.ready_workers % *flags.hosts != 0) {
    return UsageError(absl::StrCat("--hosts=", *flags.hosts, ": ", inputs.ready_workers,
                                   " workers cannot be divided evenly among as many hosts"));
  }
  if (flags.device_flops_per_s) inputs.device_flops_per_s = *flags.device_flops_per_s;
  if (flags.link_bytes_per_s) inputs.link_bytes_per_s = *flags.link_bytes_per_s;
  if (flags.host_link_bytes_per_s) {
    inputs.host_link_bytes_per_s = *flags.host_link_bytes_per_s;
    inputs.host_total_bytes_per_s = 0;
    inputs.host_link_measured = false;
  }
  if (flags.host_total_bytes_per_s) {
    inputs.host_total_bytes_per_s = *flags.host_total_bytes_per_s;
    inputs.host_link_measured = false;
  }
  if (flags.hosts.value_or(1) > 1) {
    inputs.hosts.assign(*flags.hosts, {inputs.ready_workers / *flags.hosts,
                                       inputs.device_flops_per_s, inputs.link_bytes_per_s,
                                       inputs.step_overhead_s, inputs.exchange_overhead_s});
  }
  for (HostFigures& host : inputs.hosts) {
    if (flags.device_flops_per_s) host.device_flops_per_s = *flags.device_flops_per_s;
    if (flags.link_bytes_per_s) host.link_bytes_per_s = *flags.link_bytes_per_s;
  }
  return inputs;
}

// Returns the problem that the flags describe. A flag of the other direction is an error that names
// it.
absl::StatusOr<Problem> ProblemOf(const PlanFlags& flags) {
  if (!flags.backward && flags.with_forward_result) {
    return UsageError("--with_forward_result needs --backward");
  }
  if (!flags.backward && flags.dlse) return UsageError("--dlse needs --backward");
  if (flags.backward && !flags.probability_rows.empty()) {
    return UsageError("--probabilities cannot be combined with --backward");
  }
  Problem problem;
  if (absl::Status status = flags.shape.Apply(&problem); !status.ok()) return status;
  if (absl::Status status = flags.options.Apply(&problem); !status.ok()) return status;
  problem.shape.set_packing(flags.packing);
  problem.has_dlse = flags.dlse;
  problem.lse_format = flags.lse_format;
  problem.probability_rows = flags.probability_rows;
  return problem;
}

absl::StatusOr<Planned> MakePlan(const PlanFlags& flags) {
  absl::StatusOr<Problem> asked = ProblemOf(flags);
  if (!asked.ok()) return asked.status();
  Problem& problem = *asked;
  const Direction direction = flags.backward ? Direction::kBackward : Direction::kForward;
  auto valid = ValidateLocally(problem, direction, flags.with_forward_result);
  if (!valid.ok()) return valid.status();
  auto inputs = InputsOf(flags, *valid);
  if (!inputs.ok()) return inputs.status();
  auto plan = PlanRequest(valid->spec, direction, valid->choice, *inputs);
  if (!plan.ok()) return plan.status();
  Schedule schedule = MakeSchedule(valid->spec, plan->shards, plan->recipe);
  return Planned{std::move(problem),     *inputs,
                 std::move(valid->spec), *std::move(plan),
                 std::move(schedule),    valid->choice.members};
}

// The source of the rates for the prediction.
const char* RateSource(const PlanFlags& flags) {
  if (!flags.server.server.empty()) return "server";
  return flags.device_flops_per_s && flags.link_bytes_per_s ? "flags" : "defaults";
}

std::string RateText(const PlanFlags& flags, const PlannerInputs& inputs) {
  std::string rates = absl::StrCat(HumanRate(inputs.device_flops_per_s), "FLOP/s and ",
                                   HumanBytes(inputs.link_bytes_per_s), "/s between workers");
  if (inputs.hosts.size() > 1) {
    absl::StrAppend(&rates, ", ", HumanBytes(inputs.host_link_bytes_per_s), "/s between hosts");
    if (inputs.host_total_bytes_per_s > inputs.host_link_bytes_per_s) {
      absl::StrAppend(&rates, " and ", HumanBytes(inputs.host_total_bytes_per_s),
                      "/s from all workers of a host");
    }
  }
  if (!flags.server.server.empty())
    return absl::StrCat("with rates measured by ", flags.server.server, ": ", rates);
  if (flags.device_flops_per_s && flags.link_bytes_per_s) return absl::StrCat("with ", rates);
  return absl::StrCat("with default rates, which describe no real machine: ", rates,
                      "; --server uses a service's rates");
}

Json SpansJson(const Shard& shard) {
  Json spans = Json::array();
  for (const Span& span : shard) {
    spans.push_back({{"begin", span.begin}, {"length", span.length}, {"stride", span.stride}});
  }
  return spans;
}

Json StepJson(const Program& program, const Step& step) {
  Json transfers = Json::array();
  for (const Transfer& transfer : step.transfers) {
    transfers.push_back({{"kind", transfer.kind == Transfer::Kind::kSend ? "send" : "receive"},
                         {"peer", transfer.peer},
                         {"buffer", program.buffers[transfer.range.buffer].name},
                         {"bytes", transfer.range.bytes}});
  }
  int64_t tiles = 0;
  for (const ComputeCall& call : step.calls) {
    tiles += std::llround(static_cast<double>(call.tiles) * call.share_of_heads());
  }
  return {{"transfers", transfers}, {"calls", step.calls.size()}, {"tiles", tiles}};
}

Json ToJson(const PlanFlags& flags, const Planned& planned) {
  const Plan& plan = planned.plan;
  Json ranks = Json::array();
  for (const Program& program : planned.schedule.programs) {
    const int rank = program.rank;
    Json steps = Json::array();
    for (const Step& step : program.steps) steps.push_back(StepJson(program, step));
    ranks.push_back({{"rank", rank},
                     {"spans_q", SpansJson(plan.shards.q[rank])},
                     {"spans_kv", SpansJson(plan.shards.kv[rank])},
                     {"buffer_bytes", plan.buffer_bytes[rank]},
                     {"sent_bytes", plan.sent_bytes[rank]},
                     {"tiles", plan.tiles[rank]},
                     {"steps", steps}});
  }
  return {{"command", "plan"},
          {"direction", flags.backward ? "backward" : "forward"},
          {"shape", ShapeJson(planned.problem)},
          {"options", OptionsJson(planned.problem)},
          {"plan",
           {{"schedule", ScheduleKindName(plan.recipe.schedule)},
            {"layout", LayoutName(plan.recipe.layout)},
            {"world_size", plan.shards.world_size},
            {"members", planned.members},
            {"stripe", plan.recipe.stripe},
            {"heads_per_step", plan.recipe.heads_per_step},
            {"group_size", plan.recipe.group_size},
            {"reason", plan.reason},
            {"predicted_compute_seconds", plan.predicted_compute_seconds},
            {"rates",
             {{"source", RateSource(flags)},
              {"device_flops_per_s", planned.inputs.device_flops_per_s},
              {"link_bytes_per_s", planned.inputs.link_bytes_per_s},
              {"step_overhead_s", planned.inputs.step_overhead_s},
              {"exchange_overhead_s", planned.inputs.exchange_overhead_s},
              {"hosts", std::max<size_t>(1, planned.inputs.hosts.size())},
              {"host_link_bytes_per_s", planned.inputs.host_link_bytes_per_s},
              {"host_total_bytes_per_s", planned.inputs.HostBytesPerSecond()},
              {"host_exchange_overhead_s", planned.inputs.host_exchange_overhead_s}}},
            {"exchanged_bytes", plan.exchanged_bytes},
            {"flops", plan.flops},
            {"ranks", ranks}}}};
}

int RunPlan(const PlanFlags& flags) {
  const auto planned = MakePlan(flags);
  if (!planned.ok()) return Fail(planned.status(), flags.json);
  if (flags.json) {
    Print(ToJson(flags, *planned));
    return kSuccess;
  }
  const Plan& plan = planned->plan;
  std::printf("%s, %s: %s\n", ScheduleKindName(plan.recipe.schedule),
              LayoutName(plan.recipe.layout), plan.reason.c_str());
  std::printf("%s", OptionsText(planned->problem).c_str());
  std::printf("%sFLOP, %s exchanged\npredicted %.4g s %s\n\n", HumanRate(plan.flops).c_str(),
              HumanBytes(plan.exchanged_bytes).c_str(), plan.predicted_compute_seconds,
              RateText(flags, planned->inputs).c_str());
  std::printf("%s\n%s", ToString(plan.shards).c_str(),
              ToString(planned->schedule, planned->spec).c_str());
  return kSuccess;
}

}  // namespace

void AddPlan(FlagSet& program, Run& run) {
  auto flags = std::make_shared<PlanFlags>();
  FlagSet& command =
      program.AddCommand("plan",
                         "Shards and schedule of a request: spans, transfers with their bytes, "
                         "tiles per rank and step. "
                         "Computed locally; with --server, for its ring and its measured rates");
  flags->shape.AddTo(command);
  AddPackingFlag(command, &flags->packing);
  flags->options.AddTo(command, TermForms::kFromFlags);
  AddDlseFlag(command, &flags->dlse);
  AddLseFlag(command, &flags->lse_format);
  AddProbabilitiesFlag(command, &flags->probability_rows);
  command.Add("--backward", &flags->backward, "Plan the backward pass");
  command.Add("--with_forward_result", &flags->with_forward_result,
              "Backward: out and lse are inputs and not recomputed");
  flags->server.AddSecurityTo(command);
  command.Add("--server", &flags->server.server,
              "host:port of a service: plan for its workers, with their measured rates");
  command.Add("--deadline", &flags->deadline, "Limit of the call to --server").ShowDefault();
  command
      .Add("--workers", &flags->workers,
           absl::StrCat("Workers that are ready; default: ", kDefaultWorkers, ", or the server's"))
      .InRange(1, 1024);
  const PlannerInputs defaults;
  command
      .Add("--device_flops_per_s", &flags->device_flops_per_s,
           absl::StrFormat("For the prediction; default: the server's, or %g, about one CPU "
                           "core",
                           defaults.device_flops_per_s))
      .Positive();
  command
      .Add("--link_bytes_per_s", &flags->link_bytes_per_s,
           absl::StrFormat("For the prediction; default: the server's, or %g",
                           defaults.link_bytes_per_s))
      .Positive();
  command
      .Add("--hosts", &flags->hosts,
           "Hosts that have as many of the workers each; default: 1, or the server's")
      .InRange(1, 1024);
  command
      .Add("--host_link_bytes_per_s", &flags->host_link_bytes_per_s,
           absl::StrFormat("From one worker to another host, for the prediction; default: the "
                           "server's, or %g",
                           defaults.host_link_bytes_per_s))
      .Positive();
  command
      .Add("--host_total_bytes_per_s", &flags->host_total_bytes_per_s,
           "From all workers of a host together to another host, for the prediction; default: the "
           "server's, or --host_link_bytes_per_s")
      .Positive();
  command.Add("--json", &flags->json, "Print one JSON object (docs/cli-json.md)");
  command.OnChosen([flags, &run] { run = [flags] { return RunPlan(*flags); }; });
}

}  // namespace ringattn::client::cli
